"""`python -m gpipe_hpc.preflight`: whether hosts, ranks and links are fit for a run."""

from gpipe_hpc.preflight.run import preflight

__all__ = ["preflight"]
