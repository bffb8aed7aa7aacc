"""JPEG and PNG images, decoded when they are read, cut and scaled to one size."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from gpipe_hpc.data.dataset import CorruptSampleError
from gpipe_hpc.data.images.augmentation import (
    CentreCrop,
    Crop,
    Pixels,
    RandomResizedCrop,
    cut,
    uniform,
)
from gpipe_hpc.data.images.source import (
    Classes,
    ImageSource,
    Normalisation,
    PixelDataConfig,
    as_numbers,
)
from gpipe_hpc.data.indexing.parts import percentile
from gpipe_hpc.data.indexing.tar import IMAGE_SUFFIXES
from gpipe_hpc.data.names import Names
from gpipe_hpc.data.paths import refuse_shrunk
from gpipe_hpc.errors import MissingDataError
from gpipe_hpc.settings import Choices, Level, Range, refuse


@dataclass
class CodedImagesConfig(PixelDataConfig):
    """JPEG and PNG images of any size, cut and scaled to one."""

    resize: Annotated[int, Range(1), Level.EVERYDAY] = field(default=256, kw_only=True)
    """Shorter side in pixels to which images are scaled for validation; the center is cut out."""

    min_area: Annotated[float, Range(0, 1, excludes_least=True)] = field(default=0.08, kw_only=True)
    """Smallest fraction of an image that the random part of augmentation covers."""

    max_pixels: Annotated[int, Range(1)] = field(default=2**26, kw_only=True)
    """Largest width x height of an image; a larger one is not decoded and counts as corrupt."""

    corrupt: Annotated[str, Choices("stop", "skip")] = field(default="stop", kw_only=True)
    """What happens at a sample that cannot be read: stop, or skip it, and
    take the next readable one."""

    max_corrupt: Annotated[int, Range(1)] = field(default=100, kw_only=True)
    """Largest number of skipped samples."""

    augmentations: ClassVar[tuple[str, ...]] = ("none", "resized_crop_flip")

    def check(self) -> None:
        """Refuse settings that cannot work together; raises ConfigError."""
        super().check()
        if self.channels not in (1, 3):
            raise refuse("data.channels", "3 (colour) or 1 (grey)", self.channels, "choose one")
        if self.resize < max(self.height, self.width):
            raise refuse(
                "data.resize",
                f"at least data.height={self.height} and data.width={self.width}",
                self.resize,
                "raise it: the centre of the resized image is cut out for validation",
            )


# No other: each decoder is code that strangers' bytes run through.
_FORMATS: Final = ("JPEG", "PNG")
_DEEP: Final = ("I;16", "I")  # grey of 16 bits, by a newer or older Pillow
SUFFIXES: Final = IMAGE_SUFFIXES


class CodedStore(Protocol):
    """Where coded images and their classes are."""

    @property
    def names(self) -> Names:
        """Return the name of each image within the store; validation is told apart by it."""
        ...

    @property
    def labels(self) -> Classes:
        """Return the class of each image."""
        ...

    def where(self, index: int) -> str:
        """Return the file of an image and its name in it, for a message."""
        ...

    def coded(self, index: int, max_bytes: int) -> bytes:
        """Return the bytes of an image.

        Raises CorruptSampleError if they are more than `max_bytes`, DataError if they cannot be
        read.
        """
        ...

    def pick(self, kept: npt.NDArray[np.bool_]) -> "CodedStore":
        """Return a store of those images that are marked."""
        ...

    def digest(self) -> str:
        """Return a short text that is equal where the images are."""
        ...


@dataclass(frozen=True)
class CodedImages:
    """Sample: an image decoded, cut by `crop`, scaled and normalised; and its class."""

    store: CodedStore
    size: tuple[int, int, int]  # channels, height, width
    crop: Crop
    normalisation: Normalisation
    max_pixels: int
    seed: int

    @property
    def num_samples(self) -> int:
        """Return the number of images."""
        return len(self.store.labels)

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return float32 images, [len(indices), channels, height, width].

        Raises CorruptSampleError for one that cannot be decoded.
        """
        pixels: Pixels = np.empty((len(indices), *self.size), np.uint8)
        draws = uniform(self.seed, epoch, as_numbers(indices), self.crop.num_draws)
        for image, index, drawn in zip(pixels, indices, draws, strict=True):
            image[:] = self._read_one(index, drawn)
        return self.normalisation.apply(pixels)

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 classes, [len(indices)]."""
        refuse_shrunk(self.store.labels)
        return torch.from_numpy(self.store.labels[list(indices)])

    def classes(self) -> Classes:
        """Return the classes of all samples."""
        return self.store.labels

    def stored(self, index: int) -> bytes:
        """Return a sample as it is stored: decoders of two machines may differ."""
        return self.store.coded(index, self._most_bytes) + b"%d" % self.store.labels[index]

    def digest(self) -> str:
        """Return a short text that is equal where the samples are."""
        return f"{self.store.digest()}/{self.size}/{self.crop}/{self.normalisation}/{self.seed}"

    @property
    def _most_bytes(self) -> int:
        # No more than the pixels themselves would take, and room for what else a file says.
        return 4 * self.max_pixels + 2**20

    def _read_one(self, index: int, draws: npt.NDArray[np.float64]) -> Pixels:
        coded = self.store.coded(index, self._most_bytes)
        num_channels, height, width = self.size
        try:
            image = decode(coded, num_channels, self.max_pixels)
        except MemoryError:
            raise
        except UnidentifiedImageError as error:  # its text has an address
            raise corrupt(self.store.where(index), f"{len(coded)} other bytes") from error
        except Exception as error:  # decoders raise all kinds of errors on bytes that are wrong
            raise corrupt(self.store.where(index), f"{type(error).__name__}: {error}") from error
        box = self.crop.box(image.width, image.height, draws)
        part = np.asarray(cut(image, box, height, width, self.crop.flips(draws)))
        return part.reshape(height, width, num_channels).transpose(2, 0, 1)


def decode(coded: bytes, num_channels: int, max_pixels: int) -> Image.Image:
    """Return an image in colour (3) or grey (1); raise ValueError before decoding a huge one."""
    with Image.open(io.BytesIO(coded), formats=_FORMATS) as image:
        if image.width * image.height > max_pixels:
            raise ValueError(
                f"{image.width}x{image.height} pixels, more than data.max_pixels={max_pixels}"
            )
        whole: Image.Image = image
        if image.mode in _DEEP:
            # Converted as they are, all but the darkest would be white.
            whole = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return whole.convert("RGB" if num_channels == 3 else "L")


def corrupt(where: str, got: str) -> CorruptSampleError:
    """Return the error for an image that cannot be decoded."""
    return CorruptSampleError(
        where,
        f"data: {where} is corrupt, expected a JPEG or PNG image, got {got}; replace it, or pass "
        f"over such with data.corrupt=skip",
    )


def coded_source(
    config: CodedImagesConfig,
    train: CodedStore,
    validation: CodedStore,
    seed: int,
    left_out: Mapping[str, str],
) -> ImageSource:
    """Return both sets as the settings want them; DataError for none, or for too many classes."""
    if not len(train.labels):
        raise MissingDataError(
            "data: no images, expected at least one to train on, got 0; check paths"
        )
    size = (config.channels, config.height, config.width)
    centre = CentreCrop(config.height, config.width, config.resize)
    crop = centre if config.augment == "none" else RandomResizedCrop(config.min_area)
    normalisation = Normalisation.of(config)

    def images(store: CodedStore, how: Crop) -> CodedImages:
        return CodedImages(store, size, how, normalisation, config.max_pixels, seed)

    return ImageSource(
        images(train, crop),
        images(validation, centre),
        config.num_classes,
        corrupt=dict(left_out),
    )


def split(store: CodedStore, percent: int) -> tuple[CodedStore, CodedStore]:
    """Return images to train on and `percent` of them to validate on, by a hash of their names."""
    held = np.fromiter(
        (percentile(name.encode("utf-8", "surrogateescape")) < percent for name in store.names),
        np.bool_,
        len(store.labels),
    )
    return store.pick(~held), store.pick(held)
