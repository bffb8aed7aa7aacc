"""A folder of images for each class, as ImageNet is laid out."""

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
from gpipe_hpc.data.indexing.parts import Arrays, Part
from gpipe_hpc.data.indices import Keeping, indexed
from gpipe_hpc.data.names import Names
from gpipe_hpc.data.paths import folder, unreadable
from gpipe_hpc.errors import UnfitDataError
from gpipe_hpc.settings import Level, Range, refuse


@dataclass
class ImageFolderConfig(CodedImagesConfig):
    """A folder of images for each class."""

    index_dir: Annotated[str | None, Level.CLUSTER] = field(default=None, kw_only=True)
    """Folder of the index for later runs. null: .gpipe_hpc next to the data, or run.dir."""

    path: Annotated[str | None, Level.EVERYDAY] = None
    """Folder that holds those of training and validation."""

    train: str = "train"
    """Folder within path; its folders, in order of their names, are the classes."""

    validation: str | None = "val"
    """The same for validation. null: validation_percent of the training images."""

    validation_percent: Annotated[int, Range(0, 99), Level.EVERYDAY] = 5
    """Percentage of images for validation, chosen by a hash of their name."""

    def check(self) -> None:
        """Refuse settings that cannot work together; raises ConfigError."""
        super().check()
        if not self.path:
            raise refuse("data.path", "a folder", self.path, "as data.path=/where/the/files/are")

    def open(self, seed: int, spare: Path | None) -> ImageSource:
        """Return what `open_image_folder` does."""
        return open_image_folder(self, seed, spare)


_NUM_LISTED: Final = 16  # folders at a time
_WORTH_KEEPING: Final = 20_000  # images; fewer are listed in a second


@dataclass(frozen=True)
class FolderStore:
    """Files by their names within a folder, and their classes."""

    root: Path
    names: Names
    labels: Classes

    def where(self, index: int) -> str:
        """Return the path of an image."""
        return str(self.root / self.names[index])

    def coded(self, index: int, max_bytes: int) -> bytes:
        """Return the bytes of an image; DataError if they cannot be read."""
        path = self.root / self.names[index]
        try:
            with path.open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                if num_bytes > max_bytes:
                    raise corrupt(str(path), f"more than {max_bytes} bytes: {num_bytes}")
                return file.read(num_bytes)
        except OSError as error:
            raise unreadable(path, error) from error

    def pick(self, kept: npt.NDArray[np.bool_]) -> "FolderStore":
        """Return a store of those images that are marked."""
        return FolderStore(self.root, self.names.pick(kept), self.labels[kept])

    def digest(self) -> str:
        """Return a short text of names and classes; reads no file."""
        return self.names.digest(self.labels)


def open_image_folder(
    config: ImageFolderConfig, seed: int = 0, spare: Path | None = None
) -> ImageSource:
    """Return the images under PATH/train/CLASS and PATH/val/CLASS, in order of their names.

    Lists folders, unless an earlier run kept that, and opens no image. `spare`: where the list is
    kept if the data's folder is read-only. Raises DataError for a folder that is missing, and for
    more classes than data.num_classes.
    """
    root = folder("data.path", config.path or "")
    training = folder("data.train", root / config.train)
    classes = _classes(training)
    if len(classes) > config.num_classes:
        raise UnfitDataError(
            f"data: {training} has more classes than the model, expected at most data.num_classes="
            f"{config.num_classes} folders, got {len(classes)}; set data.num_classes"
        )
    keeping = Keeping(config.index_dir, spare)
    train: CodedStore = _store(training, classes, keeping)
    if config.validation is None:
        train, validation = split(train, config.validation_percent)
    else:
        held = folder(
            "data.validation", root / config.validation, "correct it, or null for a share of train"
        )
        unknown = sorted(set(_classes(held)) - set(classes))
        if unknown:
            raise UnfitDataError(
                f"data: {held} has a class without training images, expected folders as in "
                f"{training}, got {unknown[0]!r}; rename or remove it"
            )
        validation = _store(held, classes, keeping)
    return coded_source(config, train, validation, seed, left_out={})


def _classes(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def _store(root: Path, classes: Sequence[str], keeping: Keeping) -> FolderStore:
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
    """The images of a class, and the folders they are in with the times of their last change."""

    names: list[str]
    folders: list[tuple[str, int]]


def _list(root: Path, classes: Sequence[str]) -> Part:
    """Return names and labels of all images, and `folders`: when each folder was changed."""
    # Side by side: a file server takes its time for each folder.
    with ThreadPoolExecutor(_NUM_LISTED) as pool:
        listings = list(pool.map(lambda name: _images(root, name), classes))
    names = Names(name for each in listings for name in each.names)
    counts = [len(each.names) for each in listings]
    arrays: Arrays = {
        "text": names.text,
        "ends": names.ends,
        "label": np.repeat(np.arange(len(classes), dtype=np.int32), counts),
    }
    return Part(arrays, {"folders": [each for found in listings for each in found.folders]})


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
    """Pass over a class without images of this set; raise what else the system says."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _is_sound(part: Part, num_classes: int) -> bool:
    """Say whether a list that was kept names files within the folder, and classes there are.

    Who may write beside the data must not lead a run to other files.
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


def _is_unchanged(part: Part, root: Path) -> bool:
    """Say whether no folder has changed since it was listed."""
    with ThreadPoolExecutor(_NUM_LISTED) as pool:
        is_same = pool.map(lambda each: _time_of(root / each[0]) == each[1], part.facts["folders"])
        return all(is_same)


def _time_of(folder: Path) -> int | None:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return None
