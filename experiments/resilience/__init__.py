"""Simulated goodput of a job of 1,000 ranks with failing hosts."""
