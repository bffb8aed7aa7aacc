"""Devices: CPU and accelerators, CPU cores and thread binding, host memory."""
