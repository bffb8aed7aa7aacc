"""JPEG and PNG images, decoded when they are read, cropped and resized to one size."""

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
    """Settings for JPEG and PNG images of any size, which are cropped and resized to one size."""

    resize: Annotated[int, Range(1), Level.EVERYDAY] = field(default=256, kw_only=True)
    """Length in pixels of the shorter side to which images are resized for validation, before the
    center is cropped."""

    min_area: Annotated[float, Range(0, 1, excludes_least=True)] = field(default=0.08, kw_only=True)
    """Minimum fraction of an image that a random crop covers."""

    max_pixels: Annotated[int, Range(1)] = field(default=2**26, kw_only=True)
    """Maximum width x height of an image; a larger one is not decoded and counts as corrupt."""

    corrupt: Annotated[str, Choices("stop", "skip")] = field(default="stop", kw_only=True)
    """Action at a sample that cannot be read: stop the run, or skip the sample and use the next
    readable one."""

    max_corrupt: Annotated[int, Range(1)] = field(default=100, kw_only=True)
    """Maximum number of skipped samples."""

    augmentations: ClassVar[tuple[str, ...]] = ("none", "resized_crop_flip")

    def check(self) -> None:
        """Check the settings; raise ConfigError if they are inconsistent."""
        super().check()
        if self.channels not in (1, 3):
            raise refuse("data.channels", "3 (RGB) or 1 (grayscale)", self.channels, "choose one")
        if self.resize < max(self.height, self.width):
            raise refuse(
                "data.resize",
                f"at least data.height={self.height} and data.width={self.width}",
                self.resize,
                "raise it: validation uses the center of the resized image",
            )


# Only these: each further decoder would process untrusted bytes.
_FORMATS: Final = ("JPEG", "PNG")
_DEEP: Final = ("I;16", "I")  # modes of 16-bit grayscale in newer and older versions of Pillow
SUFFIXES: Final = IMAGE_SUFFIXES


class CodedStore(Protocol):
    """Interface of stores of JPEG or PNG images and their classes."""

    @property
    def names(self) -> Names:
        """Return the names of all images; a hash of the name selects images for validation."""
        ...

    @property
    def labels(self) -> Classes:
        """Return the class index of each image."""
        ...

    def where(self, index: int) -> str:
        """Return the file that contains an image and the image's name in it, for messages."""
        ...

    def coded(self, index: int, max_bytes: int) -> bytes:
        """Return the encoded bytes of an image.

        Raises CorruptSampleError if they are more than `max_bytes`, DataError if they cannot be
        read.
        """
        ...

    def pick(self, kept: npt.NDArray[np.bool_]) -> "CodedStore":
        """Return a store of the images selected by a boolean mask."""
        ...

    def digest(self) -> str:
        """Return a digest of the images; equal digests mean equal images."""
        ...


@dataclass(frozen=True)
class CodedImages:
    """Dataset of images, decoded, cropped by `crop`, resized and normalized, with their classes."""

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
        """Return float32 images of shape [len(indices), channels, height, width].

        Raises CorruptSampleError if an image cannot be decoded.
        """
        pixels: Pixels = np.empty((len(indices), *self.size), np.uint8)
        draws = uniform(self.seed, epoch, as_numbers(indices), self.crop.num_draws)
        for image, index, drawn in zip(pixels, indices, draws, strict=True):
            image[:] = self._read_one(index, drawn)
        return self.normalisation.apply(pixels)

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 classes of shape [len(indices)]."""
        refuse_shrunk(self.store.labels)
        return torch.from_numpy(self.store.labels[list(indices)])

    def classes(self) -> Classes:
        """Return the classes of all samples."""
        return self.store.labels

    def stored(self, index: int) -> bytes:
        """Return a sample's encoded bytes and class; decoded pixels may differ between machines."""
        return self.store.coded(index, self._most_bytes) + b"%d" % self.store.labels[index]

    def digest(self) -> str:
        """Return a digest of the images and of the settings that determine the samples."""
        return f"{self.store.digest()}/{self.size}/{self.crop}/{self.normalisation}/{self.seed}"

    @property
    def _most_bytes(self) -> int:
        # The uncompressed pixels plus 1 MB for metadata.
        return 4 * self.max_pixels + 2**20

    def _read_one(self, index: int, draws: npt.NDArray[np.float64]) -> Pixels:
        coded = self.store.coded(index, self._most_bytes)
        num_channels, height, width = self.size
        try:
            image = decode(coded, num_channels, self.max_pixels)
        except MemoryError:
            raise
        except UnidentifiedImageError as error:  # its text contains a memory address
            text = f"{len(coded)} bytes in another format"
            raise corrupt(self.store.where(index), text) from error
        except Exception as error:  # decoders raise many types of errors for invalid bytes
            raise corrupt(self.store.where(index), f"{type(error).__name__}: {error}") from error
        box = self.crop.box(image.width, image.height, draws)
        part = np.asarray(cut(image, box, height, width, self.crop.flips(draws)))
        return part.reshape(height, width, num_channels).transpose(2, 0, 1)


def decode(coded: bytes, num_channels: int, max_pixels: int) -> Image.Image:
    """Decode an image to RGB (3 channels) or grayscale (1); raise ValueError if it is too large."""
    with Image.open(io.BytesIO(coded), formats=_FORMATS) as image:
        if image.width * image.height > max_pixels:
            raise ValueError(
                f"{image.width}x{image.height} pixels, more than data.max_pixels={max_pixels}"
            )
        whole: Image.Image = image
        if image.mode in _DEEP:
            # Pillow would clip 16-bit values to 255 instead of scaling them.
            whole = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return whole.convert("RGB" if num_channels == 3 else "L")


def corrupt(where: str, got: str) -> CorruptSampleError:
    """Return the error for an image that cannot be decoded."""
    return CorruptSampleError(
        where,
        f"data: {where} is corrupt: expected a JPEG or PNG image, got {got}; replace it, or set "
        f"data.corrupt=skip to skip such images",
    )


def coded_source(
    config: CodedImagesConfig,
    train: CodedStore,
    validation: CodedStore,
    seed: int,
    left_out: Mapping[str, str],
) -> ImageSource:
    """Create training and validation data sets; raise DataError if there are no training images."""
    if not len(train.labels):
        raise MissingDataError("data: no training images found; check the paths of the data")
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
    """Move `percent` of the images, selected by a hash of their names, to a validation store."""
    held = np.fromiter(
        (percentile(name.encode("utf-8", "surrogateescape")) < percent for name in store.names),
        np.bool_,
        len(store.labels),
    )
    return store.pick(~held), store.pick(held)
