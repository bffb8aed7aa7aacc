"""Verify the integrity of a checkpoint; the ranks share the work, so that each byte is read once.

The digests detect accidental changes: a flipped bit, a truncated file, a file of another
checkpoint. They do not authenticate the writer.
"""

import logging
import stat
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from gpipe_hpc.checkpoint.agreement import all_or_none, raise_first
from gpipe_hpc.checkpoint.blocks import FileBlock, blocks_of, digests
from gpipe_hpc.checkpoint.folder import error_text, other_checkpoint, read_facts, read_stored
from gpipe_hpc.checkpoint.manifest import MANIFEST, METADATA, Facts
from gpipe_hpc.checkpoint.metadata import StoredTensor, check_readable, fill, listed
from gpipe_hpc.comm.collectives.group import ControlGroup
from gpipe_hpc.errors import CheckpointError, os_remedy

log = logging.getLogger("gpipe_hpc.checkpoint")

_BLOCKS_A_ROUND: Final = 16


_RankDigests = list[tuple[str, int]]
"""Digests seen by ranks, each with the first rank that has seen it."""


class Verified(NamedTuple):
    """A checkpoint whose digests were verified (in format 1, which has none: its file sizes).

    Args:
        path: its folder.
        facts: its manifest.
        stored: descriptions of its tensors, by name.
    """

    path: Path
    facts: Facts
    stored: dict[str, StoredTensor]

    def check(self, name: str) -> None:
        """Raise OSError or ValueError if a tensor cannot be read.

        Format 1 has no digests, so the whole tensor is read.
        """
        tensor = self.stored[name]
        if self.facts["format"] == 1:
            self.fill({name: torch.empty(tensor.shape, dtype=tensor.dtype)})
        else:
            check_readable(self.path, tensor)

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Read tensors into `targets`, by name; raise OSError or ValueError on failure."""
        fill(self.path, self.stored, targets)


def verify(
    path: Path, group: ControlGroup, rank: int, say: Callable[[str], None] = lambda _: None
) -> Verified:
    """Verify that a checkpoint is intact. Collective.

    Args:
        path: the checkpoint.
        group: the ranks that share the work.
        rank: this rank.
        say: called with a description of the progress at least every 256 MiB; the ranks synchronize
            equally often, so that no rank waits long for a slower one.

    Raises:
        CheckpointError: on all ranks, for the first damaged file, with the range of bytes.
    """
    path = path.absolute()
    is_first = rank == group.ranks[0]
    facts = all_or_none(group, lambda: read_facts(path))
    _check_same(path, group, facts)
    if facts["format"] == 1 and is_first:
        log.warning(
            "checkpoint %s was written by an earlier version without hashes, so changes of its "
            "bytes cannot be detected; checkpoints of this version have hashes",
            path,
        )
    # Only one rank queries file sizes, to limit the load of a file server.
    all_or_none(group, lambda: _check_files(path, facts) if is_first else None)
    shares = _shares(_blocks(path, facts), group.size)
    mine = shares[group.position]
    for first in range(0, max(map(len, shares)), _BLOCKS_A_ROUND):
        say(f"verifying {path}: block {first} of {len(mine)}")
        raise_first(group, _damaged(path, mine[first : first + _BLOCKS_A_ROUND]))
    stored = all_or_none(group, lambda: _stored_in_files(path, facts))
    return Verified(path, facts, stored)


def _check_same(path: Path, group: ControlGroup, facts: Facts) -> None:
    seen = [(facts["digest"], group.ranks[group.position])]
    (_, first), *others = group.merge_object(seen, _first_of_two)
    if others:
        raise CheckpointError(
            f"checkpoint {path}: ranks {first} and {others[0][1]} see different checkpoints at "
            f"this path; use a folder that all machines share"
        )


def _first_of_two(ahead: _RankDigests, behind: _RankDigests) -> _RankDigests:
    """Merge digests of two groups of ranks; keep two different ones, each with its first rank."""
    first, *_ = ahead
    return [first, *(each for each in (*ahead, *behind) if each[0] != first[0])][:2]


def _check_files(path: Path, facts: Facts) -> None:
    """Raise CheckpointError for missing or truncated files; warn about additional files."""
    for name, entry in facts.get("files", {METADATA: None}).items():
        try:
            found = (path / name).stat()
        except OSError as error:
            raise _refusal(path, name, error_text(error), error) from error
        if not stat.S_ISREG(found.st_mode):
            raise _refusal(path, name, "not a regular file")
        if entry is not None and found.st_size != entry["bytes"]:
            got = f"{found.st_size:,} bytes instead of {entry['bytes']:,}"
            raise _refusal(path, name, got)
    if "files" in facts:
        strange = {each.name for each in path.iterdir()} - {MANIFEST, *facts["files"]}
        for name in sorted(strange):
            log.warning(
                "checkpoint %s: %s is not part of the checkpoint and is not read; remove it if "
                "you do not need it",
                path,
                name,
            )


def _blocks(path: Path, facts: Facts) -> list[tuple[FileBlock, str]]:
    """Return all blocks of all files with their expected digests."""
    found: list[tuple[FileBlock, str]] = []
    for name, entry in sorted(facts.get("files", {}).items()):
        blocks = blocks_of(path / name, entry["bytes"], facts["block_bytes"])
        found += zip(blocks, entry["sha256"], strict=True)
    return found


def _shares(
    blocks: list[tuple[FileBlock, str]], num_ranks: int
) -> list[list[tuple[FileBlock, str]]]:
    """Split the blocks into one contiguous group for each rank, of about equal bytes."""
    total = sum(block.size for block, _ in blocks)
    shares: list[list[tuple[FileBlock, str]]] = [[] for _ in range(num_ranks)]
    done = 0
    for block, digest in blocks:
        shares[done * num_ranks // total].append((block, digest))
        done += block.size
    return shares


def _damaged(path: Path, blocks: list[tuple[FileBlock, str]]) -> CheckpointError | None:
    """Return the error for the first block whose digest differs, or None."""
    found = digests([block for block, _ in blocks])
    for (block, written), digest in zip(blocks, found, strict=True):
        name = block.path.name
        if isinstance(digest, OSError):
            return _refusal(path, name, error_text(digest), digest)
        if digest != written:
            span = f"bytes {block.start:,} to {block.start + block.size - 1:,}"
            return _refusal(path, name, f"changed content in {span}")
    return None


def _stored_in_files(path: Path, facts: Facts) -> dict[str, StoredTensor]:
    """Return the checkpoint's tensors; raise CheckpointError if they overlap or exceed files."""
    stored = read_stored(path)
    if "tensors" in facts and _listed(stored) != facts["tensors"]:
        raise _refusal(path, MANIFEST, f"its list of tensors differs from that in {METADATA}")
    ends: dict[str, int] = {}
    for tensor in stored.values():
        ends[tensor.file] = max(ends.get(tensor.file, 0), tensor.offset + tensor.length)
    for name, end in ends.items():
        if "files" in facts:
            size = facts["files"].get(name, {"bytes": 0})["bytes"]
        else:
            try:
                size = (path / name).stat().st_size
            except OSError as error:
                raise _refusal(path, name, error_text(error), error) from error
        if size < end:
            raise _refusal(path, name, f"{size:,} bytes, but tensors extend to {end:,}")
    spans = sorted((each.file, each.offset, each.length, name) for name, each in stored.items())
    for (file, start, length, name), (other_file, other, _, other_name) in pairwise(spans):
        if file == other_file and start + length > other:
            raise _refusal(path, METADATA, f"{name} and {other_name} overlap in {file}")
    return stored


def _listed(stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    return {name: listed(tensor) for name, tensor in stored.items()}


def _refusal(path: Path, name: str, got: str, error: OSError | None = None) -> CheckpointError:
    remedy = other_checkpoint(path)
    if error is not None and not isinstance(error, FileNotFoundError):
        remedy = f"{os_remedy(error) or 'check the disk'}; {remedy}"
    return CheckpointError(f"checkpoint {path}: the file {name} is damaged: {got}; {remedy}")
