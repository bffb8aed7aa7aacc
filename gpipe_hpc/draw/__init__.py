"""`python -m gpipe_hpc.draw`: draw a simulated schedule, or the measured timeline of a run."""

from gpipe_hpc.draw.pictures import draw

__all__ = ["draw"]
