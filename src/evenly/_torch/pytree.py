"""Flattens and unflattens nested tuples, lists and dicts of tensors.

Only the path is private: the functions have kept their names and arguments since torch 2.0, and torch.export returns
their specs. The public `torch.utils.pytree` is not in torch 2.11 or 2.13.
"""

from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "TreeSpec",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
]
