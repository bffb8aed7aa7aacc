"""What a step of a run to come takes, measured ahead of it: its layers, and all else."""
