"""Heterogeneous model parallelism: a module and a layout give a module whose layers are cut over ranks."""
