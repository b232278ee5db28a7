"""Dataset + Plan -> loader of unequal batches."""

from evenly._errors import DataError
from evenly.batches.loader import Feed, feed
from evenly.batches.loading import FeedWishes

__all__ = ["DataError", "Feed", "FeedWishes", "feed"]
