"""Other tools that a session works with."""
