"""Data sets of images stored as pixels of one size: IDX files, CIFAR, scikit-learn's digits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar, Protocol

import torch
from torch import Tensor

from gpipe_hpc.data.images.augmentation import PadCropFlip, Pixels, Shift, uniform
from gpipe_hpc.data.images.source import (
    Classes,
    ImageSource,
    Normalisation,
    PixelDataConfig,
    as_numbers,
)
from gpipe_hpc.errors import MissingDataError
from gpipe_hpc.settings import Range, refuse


@dataclass
class StoredImagesConfig(PixelDataConfig):
    """Settings for images stored as pixels, all of one size."""

    padding: Annotated[int, Range(0)] = field(default=4, kw_only=True)
    """Maximum shift in pixels of an augmented image."""

    augmentations: ClassVar[tuple[str, ...]] = ("none", "pad_crop", "pad_crop_flip")
    stored_size: ClassVar[tuple[int, int, int] | None] = None  # if the format has a fixed size

    def check(self) -> None:
        """Check the settings; raise ConfigError if they are inconsistent."""
        super().check()
        if self.padding >= min(self.height, self.width):
            raise refuse("data.padding", "less than an image's side", self.padding, "lower it")
        shape = (self.channels, self.height, self.width)
        if self.stored_size not in (None, shape):
            raise refuse(
                "data.channels, data.height, data.width",
                f"{self.stored_size}, the size of the images",
                shape,
                "leave them at their defaults",
            )


class PixelStore(Protocol):
    """Interface of stores of pixels and classes, which open their files at the first read."""

    @property
    def num_images(self) -> int:
        """Return the number of images."""
        ...

    def pixels(self, indices: Sequence[int]) -> Pixels:
        """Return the given images, uint8 of shape [len(indices), channels, height, width]."""
        ...

    def classes(self) -> Classes:
        """Return the classes of all images."""
        ...

    def digest(self) -> str:
        """Return a digest of the images; equal digests mean equal images."""
        ...


@dataclass(frozen=True)
class StoredImages:
    """Dataset of images, normalized and optionally augmented by `shift`, with their classes."""

    store: PixelStore
    normalisation: Normalisation
    shift: Shift | None
    seed: int

    @property
    def num_samples(self) -> int:
        """Return the number of images."""
        return self.store.num_images

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return float32 images of shape [len(indices), channels, height, width]."""
        pixels = self.store.pixels(indices)
        if self.shift is not None:
            draws = uniform(self.seed, epoch, as_numbers(indices), self.shift.num_draws)
            pixels = self.shift.apply(pixels, draws)
        return self.normalisation.apply(pixels)

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 classes of shape [len(indices)]."""
        return torch.from_numpy(self._classes[list(indices)])

    def classes(self) -> Classes:
        """Return the classes of all samples."""
        return self._classes

    @cached_property
    def _classes(self) -> Classes:
        # Cached: classes stored among the pixels need a pass over the files.
        return self.store.classes()

    def digest(self) -> str:
        """Return a digest of the images and of the settings that determine the samples."""
        return f"{self.store.digest()}/{self.normalisation}/{self.shift}/{self.seed}"


def stored_source(
    config: StoredImagesConfig, train: PixelStore, validation: PixelStore, seed: int
) -> ImageSource:
    """Create training and validation data sets; raise DataError if there are no training images."""
    if not train.num_images:
        raise MissingDataError("data: no training images found; check data.path")
    shift = None
    if config.augment != "none":
        shift = PadCropFlip(config.padding, flips=config.augment == "pad_crop_flip")
    normalisation = Normalisation.of(config)
    return ImageSource(
        StoredImages(train, normalisation, shift, seed),
        StoredImages(validation, normalisation, None, seed),
        config.num_classes,
    )
