"""Passes that lower a compute-only table: recomputation, communication, reductions, offloading."""
