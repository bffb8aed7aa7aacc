"""Causes of slow steps that are injected into real runs, and what the report says of them."""
