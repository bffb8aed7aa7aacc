"""Images and their classes: stored pixel by pixel, or as JPEG and PNG."""
