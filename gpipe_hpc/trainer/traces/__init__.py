"""Measured timelines of a run: held in memory on each rank, gathered once, kept in files."""
