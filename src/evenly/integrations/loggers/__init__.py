"""Loggers for `session.listen`: each sends the numbers of a run to one tool. Rank 0 writes, on its first event."""

from evenly.integrations.loggers.mlflow import MlflowLogger
from evenly.integrations.loggers.prometheus import PrometheusLogger
from evenly.integrations.loggers.tensorboard import TensorBoardLogger
from evenly.integrations.loggers.wandb import WandbLogger

__all__ = ["MlflowLogger", "PrometheusLogger", "TensorBoardLogger", "WandbLogger"]
