"""Periods, the agreed step counter, adaptive periods, the step clock."""
