"""Inject causes of slow steps into real runs, and check the advice of the report."""
