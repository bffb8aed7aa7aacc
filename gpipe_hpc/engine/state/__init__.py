"""What a layer changes when it runs: buffers and random generators, once a micro-batch."""
