"""What ranks hold, may hold, and what is said where that is too much."""
