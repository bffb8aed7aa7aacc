"""`python -m gpipe_hpc.draw`: draw a schedule as simulated, or a run as measured."""

from gpipe_hpc.draw.pictures import draw

__all__ = ["draw"]
