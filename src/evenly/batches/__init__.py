"""Dataset + Plan -> loader of unequal batches."""

from evenly.batches.evaluation import EvaluationFeed, EvaluationPart, evaluation_part
from evenly.batches.loader import Feed, feed, steps_per_epoch
from evenly.batches.loading import FeedOptions
from evenly.errors import DataError

__all__ = [
    "DataError",
    "EvaluationFeed",
    "EvaluationPart",
    "Feed",
    "FeedOptions",
    "evaluation_part",
    "feed",
    "steps_per_epoch",
]
