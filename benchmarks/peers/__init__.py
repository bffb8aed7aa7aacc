"""Comparison with all peers: measurements, claims and tables."""
