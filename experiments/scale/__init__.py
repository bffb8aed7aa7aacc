"""Thousands of ranks: what starting, tabulating and timing them takes."""
