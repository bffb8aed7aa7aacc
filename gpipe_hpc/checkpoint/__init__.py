"""Checkpoints in torch.distributed.checkpoint's format, which any parallel layout can load.

A checkpoint is a folder. It is written under a temporary name and renamed when it is complete.
Tensors have names that do not depend on the layout; a manifest contains digests of all files, which
detect later damage. Nothing in the files is executed.
"""

from gpipe_hpc.checkpoint.background import BackgroundSaver
from gpipe_hpc.checkpoint.folder import PARTIAL_SUFFIX, has_files, read_facts, read_owner, sync
from gpipe_hpc.checkpoint.loading import load
from gpipe_hpc.checkpoint.manifest import is_manifest_as_written
from gpipe_hpc.checkpoint.metadata import fill
from gpipe_hpc.checkpoint.numbered import latest, save_numbered, step_name
from gpipe_hpc.checkpoint.saving import save
from gpipe_hpc.checkpoint.verifying import Verified, verify

__all__ = [
    "PARTIAL_SUFFIX",
    "BackgroundSaver",
    "Verified",
    "fill",
    "has_files",
    "is_manifest_as_written",
    "latest",
    "load",
    "read_facts",
    "read_owner",
    "save",
    "save_numbered",
    "step_name",
    "sync",
    "verify",
]
