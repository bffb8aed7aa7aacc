"""How a failure or silence reaches all ranks, and what a user reads about it."""
