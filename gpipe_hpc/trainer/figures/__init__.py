"""Metrics of a run: writers, progress, trackers, throughput and share of peak."""
