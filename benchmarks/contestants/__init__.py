"""Who takes part: ours, the floor, plain PyTorch and what torch itself has to offer."""
