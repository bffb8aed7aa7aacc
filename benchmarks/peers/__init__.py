"""All peers beside ours: what is measured, what is claimed, and the tables."""
