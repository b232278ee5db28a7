"""What `shards.py` measures: networks, layouts, the steps of each rank, and the result."""
