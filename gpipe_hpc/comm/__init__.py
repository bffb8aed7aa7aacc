"""Ranks and what moves between them: launch, mesh, transports, collectives, failure."""
