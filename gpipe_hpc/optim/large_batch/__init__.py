"""Methods that preserve accuracy with large batches: AdaScale, LARS, LAMB, batch size ramp."""
