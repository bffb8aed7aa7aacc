"""Backwards of a layer: whole, or in two halves, I for its inputs and W for its weights."""
