"""The contestants: gpipe_hpc, the floor, plain PyTorch and torch's own pipelining."""
