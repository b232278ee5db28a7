"""Signals that reach a process by two ways."""

SAME_SIGNAL_S = 5.0  # within this time a second signal is taken for the first one: launchers pass theirs on
