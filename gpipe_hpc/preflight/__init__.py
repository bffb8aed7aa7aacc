"""`python -m gpipe_hpc.preflight`: check whether hosts, ranks and links are ready for a run."""
