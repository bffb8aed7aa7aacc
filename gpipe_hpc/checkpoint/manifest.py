"""Manifest of a checkpoint: its metadata and the digests of all its files.

One JSON file, ``gpipe_hpc.json``. Its last line contains the SHA-256 of all preceding bytes, so
that damage to the manifest itself is detected. Format 1, which had no digests, can still be read.
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
from gpipe_hpc.small_files import Number, OrNull, Values, mismatch, parse_json, read_bytes

MANIFEST: Final = "gpipe_hpc.json"
FORMAT: Final = 2
TYPED: Final = "typed"
"""Key of entries of `extra` and `values` that JSON cannot represent exactly, encoded by `split`."""
METADATA: Final = ".metadata"
"""Name of the file in which torch lists the tensors."""
MOST_BYTES: Final = 2**28
_MOST_VALUES: Final = 16_000_000
_MOST_STEPS: Final = 2**53
_NEEDED: Final = frozenset({"parameters", "values", "steps_done", "loss_weight", "extra"})
_NEEDED_SINCE_2: Final = frozenset({"files", "block_bytes", "tensors", "states"})
_TAIL: Final = re.compile(rb',\n "digest": "([0-9a-f]{64})"\n}\n\Z')

_COUNT: Final = Number(0, is_whole=True)
_ANY_COUNT: Final = OrNull(Number(1, is_whole=True))
_NUMBERS: Final = OrNull([Number(0)])
_GROUPS: Final = [{"kind": str, "options": {}, "state": [str], "parameters": [str]}]
_SHAPE: Final[dict[str, Any]] = {
    "steps_done": _COUNT,
    "loss_weight": Number(is_finite=False),
    "loss_scale": OrNull({"value": Number(0), "num_good": _COUNT, "num_skipped": _COUNT}),
    "parameters": Values(_COUNT),
    "values": {},
    "extra": {},
    "optimizer": OrNull(_GROUPS),
    "partition": OrNull(
        {
            "counts": [_COUNT],
            "costs": [Number(0)],
            "measure": str,
            "times": OrNull([[Number(0)]]),
            "seconds": OrNull([[Number(0)]]),
            "paces": _NUMBERS,
            "rank_paces": _NUMBERS,
            "num_ranks": _ANY_COUNT,
            "pins": OrNull([list]),
            "made_on": OrNull(str),
        }
    ),
    "apart": OrNull({"replicas": Number(1, is_whole=True), "differ": bool}),
    "versions": OrNull(Values(str)),
    "schedule": OrNull(str),
    **dict.fromkeys(("num_layers", "ranks", "stages", "replicas", "microbatches"), _ANY_COUNT),
}
_SHAPE_SINCE_2: Final[dict[str, Any]] = {
    "tensors": Values({"shape": [_COUNT], "dtype": str}),
    "states": {},
    TYPED: OrNull({"values": OrNull([list])}),  # and "extra": see `join`
}

Facts = dict[str, Any]
"""The content of a manifest, a JSON object."""


def manifest_text(facts: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest, with the digest of all other bytes as its last entry.

    Raises TypeError or ValueError if the facts are not JSON values or are too large.
    """
    body = json.dumps(facts, indent=1).removesuffix("\n}").encode()
    if len(body) > MOST_BYTES - 100:
        raise ValueError(f"a {MANIFEST} of {len(body):,} bytes, more than {MOST_BYTES:,}")
    return body + b',\n "digest": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def read_manifest(path: Path) -> Facts:
    """Read and validate the manifest of a checkpoint.

    Raises OSError if there is none, ValueError if it is damaged or invalid.
    """
    raw = _read(path)
    tail = _TAIL.search(raw)
    if not _is_as_written(raw):
        raise ValueError(f"a damaged {MANIFEST}: its digest is wrong")
    try:
        facts: Facts = parse_json(raw, _MOST_VALUES)
    except ValueError as error:
        raise ValueError(f"a {MANIFEST} that is not JSON ({error})") from error
    needed = _NEEDED | _NEEDED_SINCE_2 if tail else _NEEDED
    lacking = needed - facts.keys() if isinstance(facts, dict) else needed
    if lacking:
        raise ValueError(f"no {', '.join(sorted(lacking))} in {MANIFEST}")
    wanted = FORMAT if tail else 1
    if facts.get("format", 1) != wanted or (not tail and _NEEDED_SINCE_2 & facts.keys()):
        raise ValueError(
            f"a {MANIFEST} of format {facts.get('format')} "
            + ("from a newer version" if tail else "that does not end with its own digest")
        )
    if tail and not _lists_files(facts):
        raise ValueError(f"a {MANIFEST} with an invalid list of files")
    wrong = mismatch(facts, _SHAPE | (_SHAPE_SINCE_2 if tail else {})) or _disagreement(facts)
    if wrong:
        raise ValueError(f"an invalid {MANIFEST}: {wrong}")
    typed = facts.pop(TYPED, None) or {}
    for key in ("extra", "values"):
        try:
            facts[key] = join(facts[key], typed.get(key) or [])
        except ValueError as error:
            raise ValueError(f"a {MANIFEST} with an invalid entry {key}: {error}") from error
    facts["digest"] = hashlib.sha256(raw).hexdigest()
    return facts


def is_manifest_as_written(path: Path) -> bool:
    """Return whether the manifest matches its digest; True if there is no manifest or no digest."""
    try:
        return _is_as_written(_read(path))
    except (OSError, ValueError):
        return True


def read_part(path: Path) -> Any:
    """Return the JSON content of a manifest without validation, even of an incomplete checkpoint.

    Raises OSError or ValueError if it cannot be read.
    """
    return parse_json(_read(path), _MOST_VALUES)


def _read(path: Path) -> bytes:
    return read_bytes(path / MANIFEST, MOST_BYTES)


def _is_as_written(raw: bytes) -> bool:
    """Return whether the digest in the last line, if any, is that of all preceding bytes."""
    tail = _TAIL.search(raw)
    return not tail or hashlib.sha256(raw[: tail.start()]).hexdigest().encode() == tail[1]


def _lists_files(facts: Mapping[str, Any]) -> bool:
    """Return whether `files` names files of this folder with one digest per block."""
    size, files = facts["block_bytes"], facts["files"]
    if not isinstance(files, dict) or type(size) is not int or size < 1 or METADATA not in files:
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


def _disagreement(facts: Mapping[str, Any]) -> str | None:
    """Return a description of the first inconsistency between manifest entries, or None."""
    if facts["steps_done"] > _MOST_STEPS:
        return f"{facts['steps_done']} steps"
    apart = facts.get("apart")
    if apart is None:
        return None
    if apart["replicas"] != facts.get("replicas"):
        return f"local SGD with {apart['replicas']} of {facts.get('replicas')} replicas"
    if apart["differ"] and apart["replicas"] > len(facts["tensors"]):
        return f"{apart['replicas']} replicas that differ in {len(facts['tensors'])} tensors"
    return None


def versions() -> dict[str, str]:
    """Return the versions of gpipe_hpc, torch and Python."""
    return {
        "gpipe_hpc": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
