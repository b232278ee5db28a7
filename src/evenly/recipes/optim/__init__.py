"""Optimizers and schedules by name. torch is imported only where one is built."""

from evenly.recipes.optim.catalogue import OPTIMIZERS, SCHEDULES, OptimizerInfo, ScheduleInfo
from evenly.recipes.optim.optimizers import build_optimizer
from evenly.recipes.optim.schedules import build_schedule

__all__ = ["OPTIMIZERS", "SCHEDULES", "OptimizerInfo", "ScheduleInfo", "build_optimizer", "build_schedule"]
