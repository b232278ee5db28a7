"""Files -> arrays: one module for each form of files."""
