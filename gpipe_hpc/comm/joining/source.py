"""Which source lines of this package a rank runs."""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

_NUM_SHOWN: Final = 12


class Source(NamedTuple):
    """A digest of all Python files of the package, and the folder where they lie."""

    digest: str
    folder: str


@cache
def own_source() -> Source:
    """Return this process's; read once, some megabytes."""
    return source_in(Path(__file__).resolve().parents[2])


def source_in(folder: Path) -> Source:
    """Return the source in a folder."""
    text = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        lines = path.read_bytes()
        text.update(f"{path.relative_to(folder).as_posix()} {len(lines)}\n".encode() + lines)
    return Source(text.hexdigest(), str(folder))


def unequal_sources(sources: Sequence[Source]) -> str:
    """Return which ranks run other source lines than rank 0; empty if none does."""
    first = sources[0]
    ranks = [rank for rank, source in enumerate(sources) if source.digest != first.digest]
    if not ranks:
        return ""
    other = sources[ranks[0]]
    shown = ", ".join(map(str, ranks[:_NUM_SHOWN])) + (", ..." if len(ranks) > _NUM_SHOWN else "")
    return (
        f"launch: the ranks run other source lines of gpipe_hpc, expected those of rank 0 "
        f"({first.folder}, {first.digest[:12]}), got others on "
        f"{'rank' if len(ranks) == 1 else 'ranks'} {shown} ({other.folder}, "
        f"{other.digest[:12]}); install one version on all machines, or start from one shared "
        f"folder"
    )
