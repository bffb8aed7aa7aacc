"""Images stored pixel by pixel, all of one size: IDX files, CIFAR, scikit-learn's digits."""

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
    """Images stored pixel by pixel, all of one size."""

    padding: Annotated[int, Range(0)] = field(default=4, kw_only=True)
    """Largest shift in pixels of an augmented image."""

    augmentations: ClassVar[tuple[str, ...]] = ("none", "pad_crop", "pad_crop_flip")
    stored_size: ClassVar[tuple[int, int, int] | None] = None  # where all files have the same

    def check(self) -> None:
        """Refuse settings that cannot work together; raises ConfigError."""
        super().check()
        if self.padding >= min(self.height, self.width):
            raise refuse("data.padding", "less than an image's side", self.padding, "lower it")
        shape = (self.channels, self.height, self.width)
        if self.stored_size not in (None, shape):
            raise refuse(
                "data.channels, data.height, data.width",
                f"{self.stored_size}, as the images are",
                shape,
                "leave them as they are",
            )


class Store(Protocol):
    """Where pixels and classes are; opened at the first read."""

    @property
    def num_images(self) -> int:
        """Return how many there are."""
        ...

    def pixels(self, indices: Sequence[int]) -> Pixels:
        """Return these images, [images, channels, height, width]."""
        ...

    def classes(self) -> Classes:
        """Return the classes of all images."""
        ...

    def digest(self) -> str:
        """Return a short text that is equal where the images are."""
        ...


@dataclass(frozen=True)
class StoredImages:
    """Sample: an image, normalised and, where there is a `shift`, varied; and its class."""

    store: Store
    normalisation: Normalisation
    shift: Shift | None
    seed: int

    @property
    def num_samples(self) -> int:
        """Return the number of images."""
        return self.store.num_images

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return float32 images, [len(indices), channels, height, width]."""
        pixels = self.store.pixels(indices)
        if self.shift is not None:
            draws = uniform(self.seed, epoch, as_numbers(indices), self.shift.num_draws)
            pixels = self.shift.apply(pixels, draws)
        return self.normalisation.apply(pixels)

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 classes, [len(indices)]."""
        return torch.from_numpy(self._classes[list(indices)])

    def classes(self) -> Classes:
        """Return the classes of all samples."""
        return self._classes

    @cached_property
    def _classes(self) -> Classes:
        # Once: classes that lie among the pixels cost a pass over the files.
        return self.store.classes()

    def digest(self) -> str:
        """Return a short text that is equal where the samples are."""
        return f"{self.store.digest()}/{self.normalisation}/{self.shift}/{self.seed}"


def stored_source(
    config: StoredImagesConfig, train: Store, validation: Store, seed: int
) -> ImageSource:
    """Return both sets as the settings want them; DataError without training images."""
    if not train.num_images:
        raise MissingDataError(
            "data: no images, expected at least one to train on, got 0; check the path"
        )
    shift = None
    if config.augment != "none":
        shift = PadCropFlip(config.padding, flips=config.augment == "pad_crop_flip")
    normalisation = Normalisation.of(config)
    return ImageSource(
        StoredImages(train, normalisation, shift, seed),
        StoredImages(validation, normalisation, None, seed),
        config.num_classes,
    )
