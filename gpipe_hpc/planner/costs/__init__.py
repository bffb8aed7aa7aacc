"""Costs of layers: counted on the meta device, measured here, or computed from device speeds."""
