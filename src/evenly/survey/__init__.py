"""The world -> Cluster -> Profile."""

from evenly.survey.devices import inputs_of, train_step
from evenly.survey.discover import describe_device, survey_cluster
from evenly.survey.measure import fastest_groups, measure_cluster
from evenly.survey.stopwatch import LONG_S, interquartile_mean, synchronize_device

__all__ = [
    "LONG_S",
    "describe_device",
    "fastest_groups",
    "inputs_of",
    "interquartile_mean",
    "measure_cluster",
    "survey_cluster",
    "synchronize_device",
    "train_step",
]
