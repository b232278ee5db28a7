"""What `exchange.py` measures: its methods, the rounds on each rank, and a module for each part of --full."""
