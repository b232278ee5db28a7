"""Dataset + Plan -> loader of unequal batches."""

from evenly._errors import DataError
from evenly.batches.loader import Feed, feed

__all__ = ["DataError", "Feed", "feed"]
