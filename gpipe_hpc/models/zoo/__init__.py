"""The named models, each a sequence of layers."""
