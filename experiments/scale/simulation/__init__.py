"""Simulation of one step of a job of up to 10,000 ranks on a described cluster."""
