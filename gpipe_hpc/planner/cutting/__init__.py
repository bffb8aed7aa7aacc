"""Partition a sequence of layers into stages."""
