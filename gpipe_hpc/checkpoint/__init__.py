"""Checkpoints that any layout can load: torch.distributed.checkpoint, keyed by global names.

A checkpoint is a folder. It is written aside and appears by one rename, so that a folder with
its final name is always whole.
"""

from gpipe_hpc.checkpoint.folder import (
    PARTIAL_SUFFIX,
    read_facts,
    read_metadata,
    read_owner,
    sync,
)
from gpipe_hpc.checkpoint.loading import load
from gpipe_hpc.checkpoint.saving import save

__all__ = [
    "PARTIAL_SUFFIX",
    "load",
    "read_facts",
    "read_metadata",
    "read_owner",
    "save",
    "sync",
]
