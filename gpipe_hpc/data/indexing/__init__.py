"""Finding out where samples lie in large files: in several processes, kept for the next run.

Nothing in here loads torch, so that the processes start quickly.
"""
