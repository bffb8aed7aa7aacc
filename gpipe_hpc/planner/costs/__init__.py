"""What layers cost: counted on the meta device, measured here, or priced by known rates."""
