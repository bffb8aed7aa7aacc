"""Replicas on two hosts that a slow link joins: what each way to combine them gives a user."""
