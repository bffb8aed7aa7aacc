"""A run and its folder: ownership, stored settings, and the checkpoint to resume from."""
