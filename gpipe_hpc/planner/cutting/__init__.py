"""How a sequence of layers is cut into stages."""
