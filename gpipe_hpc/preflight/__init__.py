"""`python -m gpipe_hpc.preflight`: are hosts, ranks and links fit for a run."""
