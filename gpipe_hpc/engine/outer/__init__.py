"""The outer data parallelism: how the copies of a stage combine their gradients."""
