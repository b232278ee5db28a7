"""Indices of tensors that ranks hold."""
