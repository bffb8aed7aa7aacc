"""The layouts that a search ranks, and the ones it may ask for."""
