"""CIFAR-10 and CIFAR-100, binary version: each record is the labels and 3 x 32 x 32 pixels."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, ClassVar, Final

import numpy as np
import numpy.typing as npt

from gpipe_hpc.data.images.augmentation import Pixels
from gpipe_hpc.data.images.source import Classes, ImageSource, checked_classes
from gpipe_hpc.data.images.stored import StoredImagesConfig, stored_source
from gpipe_hpc.data.paths import folder, refuse_shrunk, unreadable
from gpipe_hpc.errors import DataError
from gpipe_hpc.settings import Choices, Level, refuse


@dataclass
class CifarConfig(StoredImagesConfig):
    """Settings for the binary version of CIFAR-10."""

    path: Annotated[str | None, Level.EVERYDAY] = None
    """Folder of the files (cifar-10-batches-bin, cifar-100-binary)."""

    height: int = field(default=32, kw_only=True)
    width: int = field(default=32, kw_only=True)
    num_classes: int = field(default=10, kw_only=True)

    stored_size: ClassVar[tuple[int, int, int] | None] = (3, 32, 32)

    def check(self) -> None:
        """Check the settings; raise ConfigError if they are inconsistent."""
        super().check()
        if not self.path:
            raise refuse("data.path", "a folder", self.path, "as data.path=/where/the/files/are")

    def open(self, seed: int, spare: Path | None) -> ImageSource:
        """Open the files with `open_cifar`."""
        return open_cifar(self, seed)


@dataclass
class Cifar100Config(CifarConfig):
    """Settings for the binary version of CIFAR-100."""

    label: Annotated[str, Choices("fine", "coarse"), Level.EVERYDAY] = "fine"
    """fine has 100 classes, coarse 20."""

    num_classes: int = field(default=100, kw_only=True)


_SHAPE: Final = (3, 32, 32)
_NUM_PIXELS: Final = 3 * 32 * 32
_TRAIN_10: Final = tuple(f"data_batch_{number}.bin" for number in range(1, 6))


@dataclass
class CifarStore:
    """Images in files of CIFAR records.

    A record is `num_labels` labels of one byte, of which number `label` is used, then the pixels.
    """

    paths: tuple[Path, ...]
    num_labels: int
    label: int
    num_classes: int
    _ends: tuple[int, ...] = field(init=False)
    _records: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._ends = tuple(accumulate(map(self._num_records, self.paths)))

    @property
    def num_images(self) -> int:
        """Return the number of images."""
        return self._ends[-1]

    def pixels(self, indices: Sequence[int]) -> Pixels:
        """Return the given images, uint8 of shape [len(indices), 3, 32, 32]."""
        images = np.empty((len(indices), _NUM_PIXELS), np.uint8)
        for image, index in zip(images, indices, strict=True):
            file = bisect_right(self._ends, index)
            record = index - (self._ends[file - 1] if file else 0)
            image[:] = self._file(file)[record, self.num_labels :]
        return images.reshape(-1, *_SHAPE)

    def classes(self) -> Classes:
        """Return the classes of all images; raise DataError if one is out of range."""
        parts = []
        for number, path in enumerate(self.paths):
            labels = self._file(number)[:, self.label].astype(np.int64)
            parts.append(checked_classes(labels, self.num_classes, str(path)))
        return np.concatenate(parts)

    def digest(self) -> str:
        """Return a digest of file names, numbers of images and the label used."""
        return f"{[path.name for path in self.paths]}/{self._ends}/{self.label}"

    def _num_records(self, path: Path) -> int:
        try:
            num_bytes = path.stat().st_size
        except OSError as error:
            raise unreadable(path, error) from error
        size = self.num_labels + _NUM_PIXELS
        if not num_bytes or num_bytes % size:
            raise DataError(
                f"data: {path} ends inside a record: expected a multiple of {size} bytes, got "
                f"{num_bytes}; download it again (the binary version, not the pickled one)"
            )
        return num_bytes // size

    def _file(self, number: int) -> npt.NDArray[np.uint8]:
        if number not in self._records:
            first = self._ends[number - 1] if number else 0
            shape = (self._ends[number] - first, self.num_labels + _NUM_PIXELS)
            try:
                self._records[number] = np.memmap(
                    self.paths[number], np.uint8, mode="r", shape=shape
                )
            except (OSError, ValueError) as error:
                raise unreadable(self.paths[number], error) from error
        refuse_shrunk(self._records[number])
        return self._records[number]


def open_cifar(config: CifarConfig, seed: int = 0) -> ImageSource:
    """Open CIFAR-10 or CIFAR-100; raise DataError if files are missing or truncated."""
    where = folder("data.path", config.path or "")

    def store(*names: str) -> CifarStore:
        paths = tuple(where / name for name in names)
        if isinstance(config, Cifar100Config):
            return CifarStore(paths, 2, int(config.label == "fine"), config.num_classes)
        return CifarStore(paths, 1, 0, config.num_classes)

    if isinstance(config, Cifar100Config):
        return stored_source(config, store("train.bin"), store("test.bin"), seed)
    return stored_source(config, store(*_TRAIN_10), store("test_batch.bin"), seed)
