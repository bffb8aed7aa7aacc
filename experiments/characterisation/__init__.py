"""Characterisation studies of the literature on one machine: batch, threads, processes, backend."""
