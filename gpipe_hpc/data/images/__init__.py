"""Data sets of images and their classes, stored as pixels or as JPEG and PNG files."""
