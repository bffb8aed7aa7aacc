"""A parameter server with a bound on staleness, without one, and gossip."""
