"""Dataset + Plan -> loader of unequal batches."""

from evenly.batches.loader import Feed, feed

__all__ = ["Feed", "feed"]
