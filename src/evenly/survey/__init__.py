"""The world -> Cluster."""

from evenly.survey.discover import describe_device, survey_cluster

__all__ = ["describe_device", "survey_cluster"]
