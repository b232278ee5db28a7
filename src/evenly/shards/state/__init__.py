"""What moves state: full state in and out, units that change ranks."""
