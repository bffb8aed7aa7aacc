"""Measured timelines of a run: kept in memory on each rank, gathered once, written to files."""
