"""Copies of each rank's state in the memory of another host, between the checkpoints on disk.

A process that is killed, or one host that is lost, then costs the steps since the last copy, not
those since the last checkpoint. The copies are files in a memory-backed folder, which outlive the
processes of a job but no restart of the host. They serve the layout that wrote them; another layout
reads the checkpoint.
"""

from gpipe_hpc.checkpoint.in_memory.copies import NeighbourCopies, open_copies
from gpipe_hpc.checkpoint.in_memory.files import DEFAULT_FOLDER
from gpipe_hpc.checkpoint.in_memory.finding import Found, find

__all__ = ["DEFAULT_FOLDER", "Found", "NeighbourCopies", "find", "open_copies"]
