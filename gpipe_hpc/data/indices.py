"""Where the index of data is kept, and the one way to get it: as it is kept, or made and kept."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpipe_hpc.data.indexing import kept
from gpipe_hpc.data.indexing.parts import Part


class Keeping(NamedTuple):
    """Where indices are kept.

    `chosen`: by data.index_dir, or else beside the data, or in `spare`, if that is read-only.
    """

    chosen: str | None = None
    spare: Path | None = None

    def folders(self, beside: Path) -> list[Path]:
        """Return the folders that may hold the index of data that lie in the folder `beside`."""
        if self.chosen is not None:
            return [Path(self.chosen).expanduser().absolute()]
        spare = [] if self.spare is None else [self.spare]
        return [beside.absolute() / kept.FOLDER, *spare]


def indexed(
    kind: str,
    sources: Sequence[Path],
    settings: Mapping[str, Any],
    keeping: Keeping,
    make: Callable[[], Part],
    is_sound: Callable[[Part], bool],
    is_worth_keeping: Callable[[Part], bool],
) -> Part:
    """Return the index of files or folders: as it is kept, if they are unchanged, or a new one.

    `is_sound` holds what a kept one says against the files; what takes no time to make
    (`is_worth_keeping`) is kept only where data.index_dir asks for it. Raises OSError where a
    source is not there, and what `make` raises.
    """
    place = kept.place_of(kind, sources, settings, keeping.folders(sources[0].parent))
    found = kept.load(place, is_sound)
    if found is not None:
        return found
    made = make()
    if keeping.chosen is not None or is_worth_keeping(made):
        kept.save(place, made)
    return made
