"""Collectives of ranks that share a machine, through memory that all of them map."""
