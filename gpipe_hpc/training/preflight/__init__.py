"""What is looked at before a run: room, the run folder, open files, clocks."""
