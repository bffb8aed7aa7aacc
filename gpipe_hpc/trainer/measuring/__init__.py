"""Measurements for planned runs: layer times and the other costs of a step."""
