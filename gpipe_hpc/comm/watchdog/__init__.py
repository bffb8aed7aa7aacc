"""Failure detection: how failures and stalls reach all ranks, and the messages that users read."""
