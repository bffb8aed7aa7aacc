"""A run and its folder: who owns it, which settings it keeps, what it goes on from."""
