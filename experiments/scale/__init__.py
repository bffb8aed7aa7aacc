"""Cost of starting, scheduling and simulating jobs of thousands of ranks."""
