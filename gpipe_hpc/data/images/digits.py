"""Handwritten digits from scikit-learn, which need no download.

The 1,797 scans of 8 x 8 pixels are the test set of the Optical Recognition of Handwritten Digits
set (Alpaydin and Kaynak, UCI Machine Learning Repository, 1998). Every fifth scan (indices 4, 9,
14, ...) is for validation. Consecutive scans often have the same writer, so both sets contain all
writers.
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
    """Settings for the scans of handwritten digits that scikit-learn contains."""

    channels: int = field(default=1, kw_only=True)
    height: int = field(default=8, kw_only=True)
    width: int = field(default=8, kw_only=True)
    num_classes: int = field(default=10, kw_only=True)
    padding: int = field(default=1, kw_only=True)

    stored_size: ClassVar[tuple[int, int, int] | None] = (1, 8, 8)

    def open(self, seed: int, spare: Path | None) -> ImageSource:
        """Open the data with `open_digits`."""
        return open_digits(self, seed)


_EVERY: Final = 5
_BRIGHTEST: Final = 16  # maximum of a pixel, which counts dark spots in a 4 x 4 block


@dataclass(frozen=True)
class ArrayStore:
    """Images and their classes in memory."""

    images: Pixels
    labels: Classes
    name: str

    @property
    def num_images(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def pixels(self, indices: Sequence[int]) -> Pixels:
        """Return the given images, uint8 of shape [len(indices), channels, height, width]."""
        return self.images[list(indices)]

    def classes(self) -> Classes:
        """Return the classes of all images."""
        return self.labels

    def digest(self) -> str:
        """Return a digest of the name and the number of images."""
        return f"{self.name}/{self.num_images}"


def open_digits(config: DigitsConfig, seed: int = 0) -> ImageSource:
    """Open scikit-learn's digits; raise DataError if scikit-learn is not installed."""
    scans = _load()
    # Round to bytes, as 255 / 16 is not an integer.
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
        # Imported here: only this data needs it, and the import takes a second.
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f"data: data=digits needs scikit-learn, which contains the scans ({error}); "
            f"pip install scikit-learn, or 'gpipe-hpc[data]'"
        ) from error
    return load_digits()
