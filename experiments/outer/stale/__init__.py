"""Stale-synchronous parallel training with a sharded parameter server: an exercise."""
