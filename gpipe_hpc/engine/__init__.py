"""What a rank does in a step: stages, what they keep, the executor, gradient reduction."""
