"""Simulated step times of pipelines with missing ranks."""
