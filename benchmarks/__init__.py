"""Measurements: one command per benchmark.

`plan.py`, `exchange.py`, `shards.py`, `fashion.py`, `overhead.py`, `exchange_cuda.py` and `shards_cuda.py` are run as
scripts. A folder `_<name>/` holds the modules behind a command; `common.py`, `recipe_runs.py` and `local_ranks.py` are
shared. Results are in `results/`.
"""
