"""Algorithms of collectives, their closed forms, and models of libraries; see README.md."""
