"""Optimizers, their schedules of the learning rate, and what keeps large batches as good."""
