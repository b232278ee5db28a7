"""Real steps that correct a Profile."""
