"""Optimizers, learning rate schedules, and methods for large batches."""
