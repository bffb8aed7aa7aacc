"""The published schedules, one family a file: each a function that returns a bare table."""
