"""The predefined models, each a sequence of layers."""
