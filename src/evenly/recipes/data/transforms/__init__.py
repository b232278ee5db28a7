"""Bytes of images -> bytes of images, each sample by random numbers of its own."""
