"""Orders that are searched for given costs, and how fast any order could be."""
