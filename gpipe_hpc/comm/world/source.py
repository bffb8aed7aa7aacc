"""Digest of the package's source, to check that all ranks run the same version."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

_NUM_SHOWN: Final = 12


class Source(NamedTuple):
    """Digest of all Python files of the package and the folder that contains them."""

    digest: str
    folder: str


@cache
def own_source() -> Source:
    """Return the source code version of this process; reads some megabytes once."""
    return source_in(Path(__file__).resolve().parents[2])


def source_in(folder: Path) -> Source:
    """Return the digest of the Python files in a folder."""
    text = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        lines = path.read_bytes()
        text.update(f"{path.relative_to(folder).as_posix()} {len(lines)}\n".encode() + lines)
    return Source(text.hexdigest(), str(folder))


Runs = dict[str, tuple[str, list[int]]]
"""For each digest, a folder with that source and the first ranks that run it, ascending."""


def run_by(rank: int, source: Source) -> Runs:
    """Return the `Runs` in which only this rank runs a source version."""
    return {source.digest: (source.folder, [rank])}


def merged(ahead: Runs, behind: Runs) -> Runs:
    """Merge the `Runs` of lower and of higher ranks, keeping only the first ranks of a version."""
    both = dict(ahead)
    for digest, (folder, ranks) in behind.items():
        known_folder, known = both.get(digest, (folder, []))
        both[digest] = known_folder, [*known, *ranks][: _NUM_SHOWN + 1]
    return both


def unequal_sources(runs: Runs) -> str:
    """Return an error message if ranks run different source code than rank 0, else ""."""
    (digest, (folder, _)), *others = sorted(runs.items(), key=lambda each: each[1][1])
    if not others:
        return ""
    other, (other_folder, _) = others[0]
    ranks = sorted(rank for _, (_, found) in others for rank in found)
    shown = ", ".join(map(str, ranks[:_NUM_SHOWN])) + (", ..." if len(ranks) > _NUM_SHOWN else "")
    return (
        f"launch: the ranks run different source code of gpipe_hpc: rank 0 {folder} "
        f"({digest[:12]}), {'rank' if len(ranks) == 1 else 'ranks'} {shown} {other_folder} "
        f"({other[:12]}); install one version on all machines, or start from one shared folder"
    )
