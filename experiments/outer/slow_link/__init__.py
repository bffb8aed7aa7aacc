"""Training of replicas and stages on two hosts that are connected by a slow link."""
