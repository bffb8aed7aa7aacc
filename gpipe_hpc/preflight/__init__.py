"""`python -m gpipe_hpc.preflight`: check whether hosts, ranks and links are fit for a run."""
