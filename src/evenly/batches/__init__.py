"""Dataset + Plan -> loader of unequal batches."""

from evenly.batches.dealt import DealtFeed
from evenly.batches.evaluation import EvaluationFeed, EvaluationPart, evaluation_part
from evenly.batches.ledger import SampleLedger
from evenly.batches.loader import Feed, feed, steps_per_epoch
from evenly.batches.loading import FeedOptions
from evenly.batches.report import NodeReport
from evenly.errors import DataError

__all__ = [
    "DataError",
    "DealtFeed",
    "EvaluationFeed",
    "EvaluationPart",
    "Feed",
    "FeedOptions",
    "NodeReport",
    "SampleLedger",
    "evaluation_part",
    "feed",
    "steps_per_epoch",
]
