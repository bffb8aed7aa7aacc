"""Handwritten digits that come with scikit-learn: nothing to fetch.

The 1,797 scans of 8 x 8 pixels are the test set of the Optical Recognition of Handwritten Digits
set (Alpaydin and Kaynak, UCI Machine Learning Repository, 1998). Every fifth (numbers 4, 9, 14,
...) is kept for validation. Neighbours are often by one hand, so both sets know all the writers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from gpipe_hpc.data.images.augmentation import Pixels
from gpipe_hpc.data.images.source import Classes, ImageSource, checked_classes
from gpipe_hpc.data.images.stored import StoredImagesConfig, stored_source
from gpipe_hpc.errors import DataError


@dataclass
class DigitsConfig(StoredImagesConfig):
    """The scans of handwritten digits that scikit-learn carries."""

    channels: int = field(default=1, kw_only=True)
    height: int = field(default=8, kw_only=True)
    width: int = field(default=8, kw_only=True)
    num_classes: int = field(default=10, kw_only=True)
    padding: int = field(default=1, kw_only=True)

    stored_size: ClassVar[tuple[int, int, int] | None] = (1, 8, 8)

    def open(self, seed: int, spare: Path | None) -> ImageSource:
        """Return what `open_digits` does."""
        return open_digits(self, seed)


_EVERY: Final = 5
_BRIGHTEST: Final = 16  # of a scan's pixels, which count dark spots of 4 x 4


@dataclass(frozen=True)
class ArrayStore:
    """Images and classes in memory."""

    images: Pixels
    labels: Classes
    name: str

    @property
    def num_images(self) -> int:
        """Return how many there are."""
        return len(self.images)

    def pixels(self, indices: Sequence[int]) -> Pixels:
        """Return these images, [images, channels, height, width]."""
        return self.images[list(indices)]

    def classes(self) -> Classes:
        """Return the classes of all images."""
        return self.labels

    def digest(self) -> str:
        """Return a short text that is equal where the images are."""
        return f"{self.name}/{self.num_images}"


def open_digits(config: DigitsConfig, seed: int = 0) -> ImageSource:
    """Return scikit-learn's digits; DataError without scikit-learn."""
    scans = _load()
    # 255 / 16 is no whole number: rounded, as a file of bytes would have it.
    images = np.rint(scans.images * (255 / _BRIGHTEST)).astype(np.uint8)[:, None]
    labels = checked_classes(scans.target.astype(np.int64), config.num_classes, "digits")
    held = np.arange(len(images)) % _EVERY == _EVERY - 1
    return stored_source(
        config,
        ArrayStore(images[~held], labels[~held], "digits/train"),
        ArrayStore(images[held], labels[held], "digits/validation"),
        seed,
    )


def _load() -> Any:
    try:
        # Here, since only this kind of data needs it, and it takes a second to load.
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f"data: data=digits needs scikit-learn, which carries the scans, expected to import "
            f"sklearn, got {error}; pip install scikit-learn, or 'gpipe-hpc[data]'"
        ) from error
    return load_digits()
