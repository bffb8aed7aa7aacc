"""Measurements on one accelerator: one command, ten minutes, one result file."""
