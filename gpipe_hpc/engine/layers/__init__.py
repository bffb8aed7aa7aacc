"""Layers of a stage that run together, and what surrounds them while they do."""
