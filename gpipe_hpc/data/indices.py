"""Loading of a data index from its file, or its creation if there is no valid file."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpipe_hpc.data.indexing import index_file
from gpipe_hpc.data.indexing.parts import IndexPart


class IndexFolders(NamedTuple):
    """Folders for index files: data.index_dir (`chosen`), else next to the data, else `spare`."""

    chosen: str | None = None
    spare: Path | None = None

    def folders(self, beside: Path) -> list[Path]:
        """Return the folders that may contain the index of data stored in the folder `beside`."""
        if self.chosen is not None:
            return [Path(self.chosen).expanduser().absolute()]
        spare = [] if self.spare is None else [self.spare]
        return [beside.absolute() / index_file.FOLDER, *spare]


def indexed(
    kind: str,
    sources: Sequence[Path],
    settings: Mapping[str, Any],
    keeping: IndexFolders,
    make: Callable[[], IndexPart],
    is_sound: Callable[[IndexPart], bool],
    is_worth_keeping: Callable[[IndexPart], bool],
) -> IndexPart:
    """Return the index of files or folders, loaded from a valid index file or newly created.

    Args:
        kind: type of the index, part of its file name.
        sources: the indexed files or folders.
        settings: settings that the index depends on.
        keeping: folders for index files.
        make: creates the index.
        is_sound: checks a loaded index against the files.
        is_worth_keeping: whether to save a new index without data.index_dir; small indices are fast
            to create again.

    Raises:
        OSError: if a source does not exist; errors of `make` propagate.
    """
    place = index_file.place_of(kind, sources, settings, keeping.folders(sources[0].parent))
    found = index_file.load(place, is_sound)
    if found is not None:
        return found
    made = make()
    if keeping.chosen is not None or is_worth_keeping(made):
        index_file.save(place, made)
    return made
