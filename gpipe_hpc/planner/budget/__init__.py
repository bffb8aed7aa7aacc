"""Choose the layers to recompute so that every rank stays within its memory."""
