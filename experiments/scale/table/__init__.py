"""Cost of building a table of millions of actions on rank 0, and of receiving it on other ranks."""
