"""Images in a folder per class, as in ImageNet."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_hpc.data.images.coded import (
    SUFFIXES,
    CodedImagesConfig,
    CodedStore,
    coded_source,
    corrupt,
    split,
)
from gpipe_hpc.data.images.source import Classes, ImageSource
from gpipe_hpc.data.indexing.parts import Arrays, IndexPart
from gpipe_hpc.data.indices import IndexFolders, indexed
from gpipe_hpc.data.names import Names
from gpipe_hpc.data.paths import folder, unreadable
from gpipe_hpc.errors import UnfitDataError
from gpipe_hpc.settings import Level, Range, refuse


@dataclass
class ImageFolderConfig(CodedImagesConfig):
    """Settings for images in a folder per class."""

    index_dir: Annotated[str | None, Level.CLUSTER] = field(default=None, kw_only=True)
    """Folder of the index for later runs. null: .gpipe_hpc next to the data, or run.dir."""

    path: Annotated[str | None, Level.EVERYDAY] = None
    """Folder that contains the folders for training and validation."""

    train: str = "train"
    """Folder within path; its subfolders, in order of their names, are the classes."""

    validation: str | None = "val"
    """The same for validation. null: validation_percent of the training images."""

    validation_percent: Annotated[int, Range(0, 99), Level.EVERYDAY] = 5
    """Percentage of images for validation, chosen by a hash of their name."""

    def check(self) -> None:
        """Check the settings; raise ConfigError if they are inconsistent."""
        super().check()
        if not self.path:
            raise refuse("data.path", "a folder", self.path, "as data.path=/where/the/files/are")

    def open(self, seed: int, spare: Path | None) -> ImageSource:
        """Open the folder with `open_image_folder`."""
        return open_image_folder(self, seed, spare)


_NUM_LISTED: Final = 16  # folders listed at a time
_WORTH_KEEPING: Final = 20_000  # images; fewer are listed in about a second


@dataclass(frozen=True)
class FolderStore:
    """Encoded images in files below a folder, with their classes."""

    root: Path
    names: Names
    labels: Classes

    def where(self, index: int) -> str:
        """Return the path of an image."""
        return str(self.root / self.names[index])

    def coded(self, index: int, max_bytes: int) -> bytes:
        """Return the encoded bytes of an image; raise DataError if they cannot be read."""
        path = self.root / self.names[index]
        try:
            with path.open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                if num_bytes > max_bytes:
                    raise corrupt(
                        str(path), f"{num_bytes} bytes, more than the {max_bytes} allowed"
                    )
                return file.read(num_bytes)
        except OSError as error:
            raise unreadable(path, error) from error

    def pick(self, kept: npt.NDArray[np.bool_]) -> "FolderStore":
        """Return a store of the images selected by a boolean mask."""
        return FolderStore(self.root, self.names.pick(kept), self.labels[kept])

    def digest(self) -> str:
        """Return a digest of names and classes, without reading files."""
        return self.names.digest(self.labels)


def open_image_folder(
    config: ImageFolderConfig, seed: int = 0, spare: Path | None = None
) -> ImageSource:
    """Open the images under PATH/train/CLASS and PATH/val/CLASS, in order of their names.

    Lists the folders, unless an index from an earlier run exists, and opens no image.

    Args:
        config: the data settings.
        seed: seed of random augmentations.
        spare: folder for the index if the folder of the data is read-only.

    Raises:
        DataError: if a folder is missing, or if there are more classes than data.num_classes.
    """
    root = folder("data.path", config.path or "")
    training = folder("data.train", root / config.train)
    classes = _classes(training)
    if len(classes) > config.num_classes:
        raise UnfitDataError(
            f"data: {training} has {len(classes)} folders of classes, more than data.num_classes="
            f"{config.num_classes}; raise data.num_classes"
        )
    keeping = IndexFolders(config.index_dir, spare)
    train: CodedStore = _store(training, classes, keeping)
    if config.validation is None:
        train, validation = split(train, config.validation_percent)
    else:
        held = folder(
            "data.validation", root / config.validation, "correct it, or null for a part of train"
        )
        unknown = sorted(set(_classes(held)) - set(classes))
        if unknown:
            raise UnfitDataError(
                f"data: {held} has a class {unknown[0]!r} without training images in {training}; "
                f"rename or remove it"
            )
        validation = _store(held, classes, keeping)
    return coded_source(config, train, validation, seed, left_out={})


def _classes(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def _store(root: Path, classes: Sequence[str], keeping: IndexFolders) -> FolderStore:
    try:
        part = indexed(
            "folder",
            [root, *(root / name for name in classes if (root / name).is_dir())],
            {"classes": list(classes)},
            keeping,
            make=lambda: _list(root, classes),
            is_sound=lambda part: _is_sound(part, len(classes)) and _is_unchanged(part, root),
            is_worth_keeping=lambda part: len(part.arrays["ends"]) >= _WORTH_KEEPING,
        )
    except OSError as error:
        raise unreadable(Path(error.filename or root), error) from error
    names = Names.of(part.arrays["text"], part.arrays["ends"])
    return FolderStore(root, names, part.arrays["label"].astype(np.int64))


class _Listing(NamedTuple):
    """Names of a class's images, and its subfolders with their modification times in ns."""

    names: list[str]
    folders: list[tuple[str, int]]


def _list(root: Path, classes: Sequence[str]) -> IndexPart:
    """Return the index of all images: names, labels, and modification times of the folders."""
    # In parallel: each folder takes a round trip to a file server.
    with ThreadPoolExecutor(_NUM_LISTED) as pool:
        listings = list(pool.map(lambda name: _images(root, name), classes))
    names = Names(name for each in listings for name in each.names)
    counts = [len(each.names) for each in listings]
    arrays: Arrays = {
        "text": names.text,
        "ends": names.ends,
        "label": np.repeat(np.arange(len(classes), dtype=np.int32), counts),
    }
    return IndexPart(arrays, {"folders": [each for found in listings for each in found.folders]})


def _images(root: Path, name: str) -> _Listing:
    names: list[str] = []
    folders: list[tuple[str, int]] = []
    for where, _, files in os.walk(root / name, onerror=_refuse):
        inside = os.path.relpath(where, root)
        folders.append((inside, os.stat(where).st_mtime_ns))
        names += [
            f"{inside}/{file}"
            for file in files
            if file.lower().endswith(SUFFIXES) and not file.startswith(".")
        ]
    return _Listing(sorted(names), folders)


def _refuse(error: OSError) -> None:
    """Ignore a missing class folder; raise any other error of `os.walk`."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _is_sound(part: IndexPart, num_classes: int) -> bool:
    """Return whether a stored index contains only files within the folder, and valid classes.

    The check prevents another user who can write the index from redirecting a run to other files.
    """
    ends, text, label = (part.arrays[name] for name in ("ends", "text", "label"))
    if not len(ends):
        return not len(label)
    starts = np.concatenate([[0], ends[:-1]])
    if len(ends) != len(label) or (starts >= ends).any() or int(ends[-1]) > len(text):
        return False
    if int(label.min()) < 0 or int(label.max()) >= num_classes:
        return False
    return b"../" not in text.tobytes() and not (text[starts] == ord("/")).any()


def _is_unchanged(part: IndexPart, root: Path) -> bool:
    """Return whether no folder has been modified since it was indexed."""
    with ThreadPoolExecutor(_NUM_LISTED) as pool:
        is_same = pool.map(lambda each: _time_of(root / each[0]) == each[1], part.facts["folders"])
        return all(is_same)


def _time_of(folder: Path) -> int | None:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return None
