"""Indexing of large data files in worker processes, with results stored for later runs.

No module of this package imports torch, so that the processes start quickly.
"""
