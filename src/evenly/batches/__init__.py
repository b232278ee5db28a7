"""Dataset + Plan -> loader of unequal batches."""

from evenly.batches.loader import Feed, feed
from evenly.batches.loading import FeedOptions
from evenly.errors import DataError

__all__ = ["DataError", "Feed", "FeedOptions", "feed"]
