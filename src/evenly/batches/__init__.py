"""Dataset + Plan -> loader of unequal batches."""

from evenly.batches.loader import Feed, feed, split

__all__ = ["Feed", "feed", "split"]
