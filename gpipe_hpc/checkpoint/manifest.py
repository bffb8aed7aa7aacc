"""The manifest of a checkpoint: what it is, and the digests of all its files.

One JSON file, ``gpipe_hpc.json``. Its last line holds the SHA-256 of all bytes ahead of it, so that
damage to the manifest itself is found too. Format 1, written before there were digests, is read as
well.
"""

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from gpipe_hpc import __version__
from gpipe_hpc.checkpoint.states import join

MANIFEST: Final = "gpipe_hpc.json"
FORMAT: Final = 2
TYPED: Final = "typed"
"""The key of what JSON alone would change: entries of `extra` and `values`, encoded by `split`."""
_NEEDED: Final = frozenset({"parameters", "values", "steps_done", "loss_weight", "extra"})
_NEEDED_SINCE_2: Final = frozenset({"files", "block_bytes", "tensors", "states"})
_TAIL: Final = re.compile(rb',\n "digest": "([0-9a-f]{64})"\n}\n\Z')

Facts = dict[str, Any]
"""What a manifest says: see `save` for the keys."""


def manifest_text(facts: Mapping[str, Any]) -> bytes:
    """Return the file's bytes, with the digest of all others as its last entry.

    Raises TypeError or ValueError if JSON cannot hold the facts.
    """
    body = json.dumps(facts, indent=1).removesuffix("\n}").encode()
    return body + b',\n "digest": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def read_manifest(path: Path) -> Facts:
    """Return what a checkpoint's manifest says.

    Raises OSError if there is none, ValueError if it is damaged or not one.
    """
    raw = (path / MANIFEST).read_bytes()
    tail = _TAIL.search(raw)
    if not _is_as_written(raw):
        raise ValueError(f"a {MANIFEST} whose bytes are not those that were written")
    try:
        facts: Facts = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a {MANIFEST} that is no JSON ({error})") from error
    needed = _NEEDED | _NEEDED_SINCE_2 if tail else _NEEDED
    lacking = needed - facts.keys() if isinstance(facts, dict) else needed
    if lacking:
        raise ValueError(f"no {', '.join(sorted(lacking))} in {MANIFEST}")
    wanted = FORMAT if tail else 1
    if facts.get("format", 1) != wanted or (not tail and _NEEDED_SINCE_2 & facts.keys()):
        raise ValueError(
            f"a {MANIFEST} of format {facts.get('format')} "
            + ("by a newer version" if tail else "that does not end with its own digest")
        )
    if tail and not _lists_files(facts):
        raise ValueError(f"a {MANIFEST} that lists files as nobody would write them")
    typed = facts.pop(TYPED, {})
    for key in ("extra", "values"):
        facts[key] = join(facts[key], typed.get(key, []))
    facts["digest"] = hashlib.sha256(raw).hexdigest()
    return facts


def is_manifest_as_written(path: Path) -> bool:
    """Say whether nothing of a manifest, if there is one, is known to have changed since."""
    try:
        return _is_as_written((path / MANIFEST).read_bytes())
    except OSError:
        return True


def _is_as_written(raw: bytes) -> bool:
    """Say whether the digest in the last line, where there is one, is that of all bytes ahead."""
    tail = _TAIL.search(raw)
    return not tail or hashlib.sha256(raw[: tail.start()]).hexdigest().encode() == tail[1]


def _lists_files(facts: Mapping[str, Any]) -> bool:
    """Say whether each entry is of a file in this folder, with a digest for each of its blocks."""
    size, files = facts["block_bytes"], facts["files"]
    if not isinstance(files, dict) or type(size) is not int or size < 1:
        return False
    for name, entry in files.items():
        if Path(name).name != name or name in ("", "..") or not isinstance(entry, dict):
            return False
        num_bytes, digests = entry.get("bytes"), entry.get("sha256")
        if type(num_bytes) is not int or num_bytes < 0 or not isinstance(digests, list):
            return False
        if len(digests) != -(-num_bytes // size):
            return False
    return True


def versions() -> dict[str, str]:
    """Return the versions that a checkpoint is written by."""
    return {
        "gpipe_hpc": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
