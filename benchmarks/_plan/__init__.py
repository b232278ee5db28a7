"""What `plan.py` measures, one module per claim, and what these modules share."""
