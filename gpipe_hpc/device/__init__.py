"""Devices: CPU and accelerators, cores and their threads, memory of the host."""
