"""Assignment of a machine's CPU cores and numbers of threads to its ranks."""
