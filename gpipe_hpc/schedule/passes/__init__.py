"""Passes from a bare table to the one that ranks run: recomputation, transfers, reductions."""
