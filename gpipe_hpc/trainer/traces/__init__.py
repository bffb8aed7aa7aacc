"""Measured timelines of steps, which ranks keep in memory and rank 0 writes to files at the end."""
