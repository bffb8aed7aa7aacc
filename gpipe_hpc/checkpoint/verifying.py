"""Is a checkpoint what was written? All ranks look together, each byte is read once over all.

The digests find what changed by accident: a flipped bit, a file cut short, a file of another
checkpoint. They do not tell who wrote it.
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
from gpipe_hpc.checkpoint.blocks import Block, blocks_of, digests
from gpipe_hpc.checkpoint.folder import other_checkpoint, read_facts, read_stored, said
from gpipe_hpc.checkpoint.manifest import MANIFEST, METADATA, Facts
from gpipe_hpc.checkpoint.metadata import StoredTensor, check_readable, fill, listed
from gpipe_hpc.comm.collectives.group import Gathering
from gpipe_hpc.errors import CheckpointError, os_remedy

log = logging.getLogger("gpipe_hpc.checkpoint")

_BLOCKS_A_ROUND: Final = 16


_Seen = list[tuple[str, int]]
"""Digests of what ranks see, each with the first rank that sees it."""


class Verified(NamedTuple):
    """A checkpoint whose bytes are as they were written (format 1: whose files have their sizes).

    `facts`: its manifest. `stored`: its tensors, by name.
    """

    path: Path
    facts: Facts
    stored: dict[str, StoredTensor]

    def check(self, name: str) -> None:
        """Raise OSError or ValueError if a tensor cannot be read.

        Format 1 has no digests: all of it is read.
        """
        tensor = self.stored[name]
        if self.facts["format"] == 1:
            self.fill({name: torch.empty(tensor.shape, dtype=tensor.dtype)})
        else:
            check_readable(self.path, tensor)

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Read tensors into `targets`, by name; OSError or ValueError if one cannot be read."""
        fill(self.path, self.stored, targets)


def verify(
    path: Path, group: Gathering, rank: int, say: Callable[[str], None] = lambda _: None
) -> Verified:
    """Verify that a checkpoint is intact; all ranks of the group call it, `rank` is this one's.

    `say` is called with the progress at least every 256 MiB; the ranks synchronize as often, so
    that none waits long for a slower one. Raises CheckpointError on all of them for the first
    fault, with the file and its bytes.
    """
    path = path.absolute()
    is_first = rank == group.ranks[0]
    facts = all_or_none(group, lambda: read_facts(path))
    _check_same(path, group, facts)
    if facts["format"] == 1 and is_first:
        log.warning(
            "checkpoint %s: it has no hashes, as an earlier version wrote it: whether its bytes "
            "are those that were written cannot be told; checkpoints of this version have them",
            path,
        )
    # One rank asks for sizes: a thousand would ask a file server for the same.
    all_or_none(group, lambda: _check_files(path, facts) if is_first else None)
    shares = _shares(_blocks(path, facts), group.size)
    mine = shares[group.position]
    for first in range(0, max(map(len, shares)), _BLOCKS_A_ROUND):
        say(f"verifying {path}: block {first} of {len(mine)}")
        raise_first(group, _damaged(path, mine[first : first + _BLOCKS_A_ROUND]))
    stored = all_or_none(group, lambda: _stored_in_files(path, facts))
    return Verified(path, facts, stored)


def _check_same(path: Path, group: Gathering, facts: Facts) -> None:
    seen = [(facts["digest"], group.ranks[group.position])]
    (_, first), *others = group.merge_object(seen, _first_of_two)
    if others:
        raise CheckpointError(
            f"checkpoint {path}: expected all ranks to see one folder, got another on rank "
            f"{others[0][1]} than on rank {first}; use a folder that all machines share"
        )


def _first_of_two(ahead: _Seen, behind: _Seen) -> _Seen:
    """Return the first rank with its digest, and the first with another, if there is one."""
    first, *_ = ahead
    return [first, *(each for each in (*ahead, *behind) if each[0] != first[0])][:2]


def _check_files(path: Path, facts: Facts) -> None:
    """Refuse files that are missing, of another size or no files; say which are additional."""
    for name, entry in facts.get("files", {METADATA: None}).items():
        try:
            found = (path / name).stat()
        except OSError as error:
            raise _refusal(path, name, said(error), error) from error
        if not stat.S_ISREG(found.st_mode):
            raise _refusal(path, name, "something that is no file")
        if entry is not None and found.st_size != entry["bytes"]:
            got = f"{found.st_size:,} bytes where {entry['bytes']:,} were written"
            raise _refusal(path, name, got)
    if "files" in facts:
        strange = {each.name for each in path.iterdir()} - {MANIFEST, *facts["files"]}
        for name in sorted(strange):
            log.warning(
                "checkpoint %s: %s was not written with it and is not read; move it away, if it "
                "is not yours",
                path,
                name,
            )


def _blocks(path: Path, facts: Facts) -> list[tuple[Block, str]]:
    """Return all blocks of all files, each with the digest it was written with."""
    found: list[tuple[Block, str]] = []
    for name, entry in sorted(facts.get("files", {}).items()):
        blocks = blocks_of(path / name, entry["bytes"], facts["block_bytes"])
        found += zip(blocks, entry["sha256"], strict=True)
    return found


def _shares(blocks: list[tuple[Block, str]], num_ranks: int) -> list[list[tuple[Block, str]]]:
    """Return the blocks that each of `num_ranks` looks at: about as many bytes each, in a row."""
    total = sum(block.size for block, _ in blocks)
    shares: list[list[tuple[Block, str]]] = [[] for _ in range(num_ranks)]
    done = 0
    for block, digest in blocks:
        shares[done * num_ranks // total].append((block, digest))
        done += block.size
    return shares


def _damaged(path: Path, blocks: list[tuple[Block, str]]) -> CheckpointError | None:
    """Return what is wrong with the first block that is not as it was written."""
    found = digests([block for block, _ in blocks])
    for (block, written), digest in zip(blocks, found, strict=True):
        name = block.path.name
        if isinstance(digest, OSError):
            return _refusal(path, name, said(digest), digest)
        if digest != written:
            span = f"bytes {block.start:,} to {block.start + block.size - 1:,}"
            return _refusal(path, name, f"another content in {span}: damaged, or of another one")
    return None


def _stored_in_files(path: Path, facts: Facts) -> dict[str, StoredTensor]:
    """Return the tensors that the checkpoint lists, none beyond its file or within another."""
    stored = read_stored(path)
    if "tensors" in facts and _listed(stored) != facts["tensors"]:
        raise _refusal(path, MANIFEST, f"a list of other tensors than {METADATA} has")
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
                raise _refusal(path, name, said(error), error) from error
        if size < end:
            raise _refusal(path, name, f"{size:,} bytes where tensors lie up to {end:,}")
    spans = sorted((each.file, each.offset, each.length, name) for name, each in stored.items())
    for (file, start, length, name), (other_file, other, _, other_name) in pairwise(spans):
        if file == other_file and start + length > other:
            raise _refusal(path, METADATA, f"{name} and {other_name} in the same bytes of {file}")
    return stored


def _listed(stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    return {name: listed(tensor) for name, tensor in stored.items()}


def _refusal(path: Path, name: str, got: str, error: OSError | None = None) -> CheckpointError:
    remedy = other_checkpoint(path)
    if error is not None and not isinstance(error, FileNotFoundError):
        remedy = f"{os_remedy(error) or 'look at the disk'}; {remedy}"
    return CheckpointError(
        f"checkpoint {path}: expected the file {name} as it was written, got {got}; {remedy}"
    )
