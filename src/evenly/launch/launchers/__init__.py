"""Launcher adapters: one file for each, which reads the rank of a process from its environment."""
