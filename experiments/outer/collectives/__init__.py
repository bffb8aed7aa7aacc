"""Algorithms of collectives, their costs, and what libraries make of them: see README.md."""
