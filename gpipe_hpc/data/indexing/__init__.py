"""Indexing of large files in worker processes, with results stored for later runs.

Nothing here imports torch, so that the processes start quickly.
"""
