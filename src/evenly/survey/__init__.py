"""The world -> Cluster -> Profile."""

from evenly.survey.devices import inputs_of, train_step
from evenly.survey.discover import describe_device, survey_cluster
from evenly.survey.measure import fastest_groups, measure_cluster
from evenly.survey.stopwatch import LONG_S, finish, usual

__all__ = [
    "LONG_S",
    "describe_device",
    "fastest_groups",
    "finish",
    "inputs_of",
    "measure_cluster",
    "survey_cluster",
    "train_step",
    "usual",
]
