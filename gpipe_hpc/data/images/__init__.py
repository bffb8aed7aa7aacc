"""Images and their classes, stored as pixels or as JPEG and PNG."""
