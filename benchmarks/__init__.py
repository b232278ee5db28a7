"""Measurements: one script per claim."""
