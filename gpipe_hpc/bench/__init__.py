"""`python -m gpipe_hpc.bench`: contestants side by side, in one run, on one machine."""
