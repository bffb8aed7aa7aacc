"""The numbers of a run: metrics, progress, trackers, throughput and the share of peak."""
