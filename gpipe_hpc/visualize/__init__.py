"""Render timelines as text, SVG, PNG, one HTML page or Chrome trace events. Pure Python."""

from gpipe_hpc.visualize.svg import draw_svg
from gpipe_hpc.visualize.text import draw_text

__all__ = ["draw_svg", "draw_text"]
