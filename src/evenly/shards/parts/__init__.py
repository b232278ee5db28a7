"""Tensors that hold one rank's part of a parameter or buffer."""
