"""A folder of images for each class, as ImageNet is laid out."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpipe_hpc.config import ImageFolderConfig
from gpipe_hpc.errors import DataError
from gpipe_hpc.training.data.images.coded import (
    SUFFIXES,
    CodedStore,
    coded_source,
    corrupt,
    split,
)
from gpipe_hpc.training.data.images.source import Classes, ImageSource
from gpipe_hpc.training.data.names import Names
from gpipe_hpc.training.data.paths import folder, unreadable


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
                content = file.read(max_bytes + 1)
        except OSError as error:
            raise unreadable(path, error) from error
        if len(content) > max_bytes:
            raise corrupt(str(path), f"more than {max_bytes} bytes")
        return content

    def pick(self, kept: npt.NDArray[np.bool_]) -> "FolderStore":
        """Return a store of those images that are marked."""
        return FolderStore(self.root, self.names.pick(kept), self.labels[kept])

    def digest(self) -> str:
        """Return a short text of names and classes; reads no file."""
        return self.names.digest(self.labels)


def open_image_folder(config: ImageFolderConfig, seed: int = 0) -> ImageSource:
    """Return the images under PATH/train/CLASS and PATH/val/CLASS, in order of their names.

    Lists folders, opens no image. Raises DataError for a folder that is missing, and for more
    classes than data.num_classes.
    """
    root = folder("data.path", config.path or "")
    training = folder("data.train", root / config.train)
    classes = _classes(training)
    if len(classes) > config.num_classes:
        raise DataError(
            f"data: {training} has more classes than the model, expected at most data.num_classes="
            f"{config.num_classes} folders, got {len(classes)}; set data.num_classes"
        )
    train: CodedStore = _store(training, classes)
    if config.validation is None:
        train, validation = split(train, config.validation_percent)
    else:
        held = folder(
            "data.validation", root / config.validation, "correct it, or null for a share of train"
        )
        unknown = sorted(set(_classes(held)) - set(classes))
        if unknown:
            raise DataError(
                f"data: {held} has a class without training images, expected folders as in "
                f"{training}, got {unknown[0]!r}; rename or remove it"
            )
        validation = _store(held, classes)
    return coded_source(config, train, validation, seed, left_out={})


def _classes(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def _store(root: Path, classes: Sequence[str]) -> FolderStore:
    names: list[str] = []
    counts = []
    for name in classes:
        found = sorted(_images(root, name))
        names += found
        counts.append(len(found))
    return FolderStore(root, Names(names), np.repeat(np.arange(len(classes)), counts))


def _images(root: Path, name: str) -> Iterator[str]:
    for where, _, files in os.walk(root / name):
        inside = os.path.relpath(where, root)
        for file in files:
            if file.lower().endswith(SUFFIXES) and not file.startswith("."):
                yield f"{inside}/{file}"
