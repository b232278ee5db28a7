"""The world -> Cluster -> Profile."""

from evenly.survey.discover import describe_device, survey_cluster
from evenly.survey.measure import measure_cluster

__all__ = ["describe_device", "measure_cluster", "survey_cluster"]
