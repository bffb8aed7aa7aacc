"""What making a table of millions of actions takes on rank 0, and what it is to the others."""
