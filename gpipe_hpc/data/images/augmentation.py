"""Random image augmentation with keyed random numbers, equal on every layout and worker.

Draw d of sample i in epoch e of a run with ``train.seed`` s is::

    uniform(s, e, i, d) = (words(5, s, e, i, d) >> 11) / 2**53        in [0, 1)

where ``words`` is `gpipe_hpc.data.hashing.hash_words`. Each class documents the use of its draws.
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from gpipe_hpc.data.hashing import hash_words

Pixels = npt.NDArray[np.uint8]
"""[images, channels, height, width]"""
Draws = npt.NDArray[np.float64]

_STREAM: Final = 5  # random stream; the sampler and synthetic samples use others


def uniform(seed: int, epoch: int, indices: npt.NDArray[np.uint64], num_draws: int) -> Draws:
    """Return keyed uniform random numbers in [0, 1) of shape [len(indices), num_draws]."""
    draws = np.arange(num_draws, dtype=np.uint64)
    words = hash_words(_STREAM, seed, epoch, indices[:, None], draws)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Shift(Protocol):
    """Interface of random augmentations of images that are stored as pixels."""

    @property
    def num_draws(self) -> int:
        """Return the number of random draws per image."""
        ...

    def apply(self, images: Pixels, draws: Draws) -> Pixels:
        """Return the images, each augmented with its random draws."""
        ...


@dataclass(frozen=True)
class PadCropFlip:
    """Shift each image by up to `padding` pixels with black borders, and flip half of them.

    Draws: 0 shift down, 1 shift to the right, 2 below one half: flip horizontally, if `flips` is
    set. (He et al., Deep residual learning for image recognition, 2015, section 4.2.)
    """

    padding: int
    flips: bool
    num_draws: int = 3

    def apply(self, images: Pixels, draws: Draws) -> Pixels:
        """Return the images, each augmented with its random draws."""
        pad, (height, width) = self.padding, images.shape[2:]
        padded = np.pad(images, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        tops, lefts = np.floor(draws[:, :2] * (2 * pad + 1)).astype(int).T
        varied = np.empty_like(images)
        for place, (top, left) in enumerate(zip(tops, lefts, strict=True)):
            part = padded[place, :, top : top + height, left : left + width]
            varied[place] = part[..., ::-1] if self.flips and draws[place, 2] < 0.5 else part
        return varied


class CropBox(NamedTuple):
    """A rectangle of an image, in pixels."""

    left: float
    top: float
    right: float
    bottom: float


class Crop(Protocol):
    """Interface of rules that select the part of a decoded image to be the sample."""

    @property
    def num_draws(self) -> int:
        """Return the number of random draws per image."""
        ...

    def box(self, width: int, height: int, draws: Draws) -> CropBox:
        """Return the part of an image of `width` x `height` pixels to crop."""
        ...

    def flips(self, draws: Draws) -> bool:
        """Return whether to flip the image horizontally."""
        ...


@dataclass(frozen=True)
class RandomResizedCrop:
    """A crop of random area and aspect ratio, flipped half of the time.

    (Szegedy et al., Going deeper with convolutions, 2014, section 6, as in torchvision.) Attempt t
    of 10 uses draws 4t to 4t+3: the fraction of the area, from `min_area` to 1; the logarithm of
    the aspect ratio, from 3/4 to 4/3; the vertical and the horizontal position. The first crop that
    fits is used, or else the largest central one with an allowed aspect ratio. Draw 40 below one
    half: flip horizontally.
    """

    min_area: float
    num_draws: int = 41

    def box(self, width: int, height: int, draws: Draws) -> CropBox:
        """Return the part of an image of `width` x `height` pixels to crop."""
        for share, shape, down, right in draws[:40].reshape(10, 4):
            area = width * height * (self.min_area + share * (1 - self.min_area))
            ratio = math.exp((2 * shape - 1) * math.log(4 / 3))
            wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < high <= height:
                left = math.floor(right * (width - wide + 1))
                top = math.floor(down * (height - high + 1))
                return CropBox(left, top, left + wide, top + high)
        return _middle(width, height, min(width, height * 4 / 3), min(height, width * 4 / 3))

    def flips(self, draws: Draws) -> bool:
        """Return whether to flip the image horizontally."""
        return bool(draws[40] < 0.5)


@dataclass(frozen=True)
class CentreCrop:
    """The central `height` x `width` pixels, after resizing the shorter side to `resize`."""

    height: int
    width: int
    resize: int
    num_draws: int = 0

    def box(self, width: int, height: int, draws: Draws) -> CropBox:
        """Return the part of an image of `width` x `height` pixels to crop."""
        scale = min(width, height) / self.resize
        return _middle(width, height, self.width * scale, self.height * scale)

    def flips(self, draws: Draws) -> bool:
        """Return False: validation images are not flipped."""
        return False


def cut(image: Image.Image, box: CropBox, height: int, width: int, flip: bool) -> Image.Image:
    """Crop an image and resize the crop to `height` x `width` (bilinear, with antialiasing)."""
    part = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else part


def _middle(width: int, height: int, wide: float, high: float) -> CropBox:
    left, top = (width - wide) / 2, (height - high) / 2
    # Clamp rounding errors: Pillow rejects a box that exceeds the image.
    return CropBox(max(left, 0), max(top, 0), min(left + wide, width), min(top + high, height))
