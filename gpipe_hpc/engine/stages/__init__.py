"""What a rank has for good: the tables, its stages, what enters and leaves them, its channels."""
