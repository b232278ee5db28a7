"""Verification: a cut network against the uncut one, and ranks against each other."""
