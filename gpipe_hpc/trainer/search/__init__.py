"""Search for the fastest layout that the settings allow, and its result as text."""
