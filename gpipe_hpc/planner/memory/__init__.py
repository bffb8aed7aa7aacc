"""Memory of ranks: forecasts, limits, and messages about missing memory."""
