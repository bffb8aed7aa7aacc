"""What keeps training as good with large batches: AdaScale, LARS, LAMB, a ramp of the batch."""
