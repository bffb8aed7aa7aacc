"""What is summed over micro-batches, ranks and replicas: gradients, losses, norms, statistics."""
