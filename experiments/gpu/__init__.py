"""What one accelerator shows: one command, ten minutes, one file."""
