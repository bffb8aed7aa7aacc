"""Training: the loop, its data, optimizer, learning rate, metrics and reports."""
