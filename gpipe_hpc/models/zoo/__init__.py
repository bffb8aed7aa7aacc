"""The models that have a name, each a sequence of layers."""
