"""Ways to combine gradients over replicas, each with what it brought."""
