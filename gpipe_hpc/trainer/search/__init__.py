"""The search for the best layout that settings ask for, and its answer as text."""
