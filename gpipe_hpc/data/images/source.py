"""Common parts of image data: settings, normalization, and the loss of a trivial prediction."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpipe_hpc.data.corpus import frequency_cost
from gpipe_hpc.data.dataset import Dataset
from gpipe_hpc.data.images.augmentation import Pixels
from gpipe_hpc.errors import UnfitDataError
from gpipe_hpc.settings import ImageDataConfig, Level, refuse


@dataclass
class PixelDataConfig(ImageDataConfig):
    """Settings for the augmentation and normalization of real images."""

    augment: Annotated[str, Level.EVERYDAY] = field(default="none", kw_only=True)
    """Augmentation of training images: none; pad_crop (shift by up to padding pixels) or
    pad_crop_flip (also flip horizontally) for images stored as pixels; resized_crop_flip (random
    crop, resized and flipped) for JPEG and PNG."""

    mean: Annotated[list[float], Level.EVERYDAY] = field(default_factory=list, kw_only=True)
    """Mean of each channel (0 to 1), which is subtracted."""

    std: Annotated[list[float], Level.EVERYDAY] = field(default_factory=list, kw_only=True)
    """Standard deviation of each channel, by which the result is divided."""

    augmentations: ClassVar[tuple[str, ...]] = ("none",)

    def check(self) -> None:
        """Check the settings; raise ConfigError if they are inconsistent."""
        super().check()
        if self.augment not in self.augmentations:
            choices = ", ".join(self.augmentations)
            raise refuse("data.augment", f"one of {choices}", self.augment, "choose one of them")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels or not all(math.isfinite(each) for each in values):
                expected = f"a number for each of {self.channels} channels"
                raise refuse(f"data.{name}", expected, values, "set it")
        if min(self.std) <= 0:
            remedy = "raise them; 1 leaves the values unscaled"
            raise refuse("data.std", "deviations above 0", self.std, remedy)


Classes = npt.NDArray[np.int64]


class Labelled(Dataset, Protocol):
    """A dataset in which each sample has one class."""

    def classes(self) -> Classes:
        """Return the classes of all samples."""
        ...


@dataclass(frozen=True)
class Normalisation:
    """Normalization of pixels from 0 to 255: (pixel / 255 - mean) / std per channel, in float32."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, config: PixelDataConfig) -> "Normalisation":
        """Create the normalization that the settings describe."""
        return cls(tuple(config.mean), tuple(config.std))

    def apply(self, pixels: Pixels) -> Tensor:
        """Return normalized float32 images of shape [images, channels, height, width]."""
        std = np.asarray(self.std)
        factor = (1 / (255 * std)).astype(np.float32)[:, None, None]
        offset = (np.asarray(self.mean) / std).astype(np.float32)[:, None, None]
        images = pixels.astype(np.float32)
        images *= factor
        images -= offset
        return torch.from_numpy(images)


@dataclass(frozen=True)
class ImageSource:
    """Training and validation images, with a description and a baseline loss."""

    train: Labelled
    validation: Labelled
    num_classes: int
    loss: str = "classification"
    corrupt: Mapping[str, str] = field(default_factory=dict)
    about: str = ""

    def baseline(self) -> float | None:
        """Return the validation loss of predicting classes by their training frequency.

        In nats per sample; None if there are no validation images.
        """
        if not self.validation.num_samples:
            return None
        seen, wanted = (
            np.bincount(part.classes(), minlength=self.num_classes)
            for part in (self.train, self.validation)
        )
        return frequency_cost(seen, wanted)


def checked_classes(classes: Classes, num_classes: int, where: str) -> Classes:
    """Return `classes` unchanged; raise DataError if one is outside 0 to `num_classes` - 1."""
    wrong = classes[(classes < 0) | (classes >= num_classes)]
    if wrong.size:
        raise UnfitDataError(
            f"data: {where} has a class out of range: expected 0 to {num_classes - 1}, got "
            f"{int(wrong[0])}; correct data.num_classes, or the file"
        )
    return classes


def as_numbers(indices: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Convert sample indices to uint64 words for hashing."""
    return np.asarray(indices, np.uint64)
