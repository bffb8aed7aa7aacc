"""In-memory checkpoints: each rank's state in the memory of another host, between saves to disk.

A killed process, or the loss of one host, then costs the steps since the last copy instead of those
since the last checkpoint on disk. The copies are files in a memory-backed folder, which outlive the
processes of a job but not a restart of the host. They can only be loaded in the layout that wrote
them; another layout loads the checkpoint on disk.
"""

from gpipe_hpc.checkpoint.in_memory.copies import NeighbourCopies, open_copies
from gpipe_hpc.checkpoint.in_memory.files import DEFAULT_FOLDER
from gpipe_hpc.checkpoint.in_memory.search import CopySet, find

__all__ = ["DEFAULT_FOLDER", "CopySet", "NeighbourCopies", "find", "open_copies"]
