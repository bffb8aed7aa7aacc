"""Tests of image augmentation: draws depend on seed, epoch and sample, and are uniform."""

import math

import numpy as np
import pytest
from PIL import Image

from gpipe_hpc.data.images.augmentation import (
    CentreCrop,
    PadCropFlip,
    RandomResizedCrop,
    cut,
    uniform,
)


def numbers(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint64)


def test_draws_are_the_published_ones():
    """Draws follow the formula in the docstrings, on which resumed runs depend."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    def expected(*words: int) -> float:
        state = 0
        for word in words:
            state = mix((state + golden * (word + 1)) & mask)
        return (state >> 11) / 2**53

    draws = uniform(7, 2, np.array([5, 11], np.uint64), 3)
    assert draws.tolist() == [[expected(5, 7, 2, i, d) for d in range(3)] for i in (5, 11)]


def test_draws_depend_on_the_sample_not_on_its_company():
    whole = uniform(1, 0, numbers(10), 4)
    assert (uniform(1, 0, numbers(10)[3:5], 4) == whole[3:5]).all()
    assert not (uniform(1, 1, numbers(10), 4) == whole).any()
    assert not (uniform(2, 0, numbers(10), 4) == whole).any()


def test_draws_are_uniform():
    draws = uniform(0, 0, numbers(4000), 5)
    assert draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws, 20, (0, 1))[0]  # 19 degrees of freedom: 56 is 6 sigma away
    assert ((counts - 1000) ** 2 / 1000).sum() < 56
    assert np.abs(np.corrcoef(draws.T) - np.eye(5)).max() < 0.1


def test_shift_moves_each_image_by_its_draws():
    image = np.arange(1, 13, dtype=np.uint8).reshape(1, 1, 3, 4)
    still = np.array([[0.5, 0.5, 0.9]])
    assert (PadCropFlip(1, flips=True).apply(image, still) == image).all()
    # Draw 0 is 0: the window starts one row above the image, so the first row is black.
    moved = PadCropFlip(1, flips=False).apply(image, np.array([[0.0, 0.99, 0.1]]))
    assert moved[0, 0].tolist() == [[0, 0, 0, 0], [2, 3, 4, 0], [6, 7, 8, 0]]
    mirrored = PadCropFlip(1, flips=True).apply(image, np.array([[0.5, 0.5, 0.1]]))
    assert (mirrored == image[..., ::-1]).all()


def test_shifts_are_spread_evenly():
    """Chi-squared test of a bright pixel's positions: 35 cells, 34 degrees of freedom."""
    count, pad = 10_000, 2
    image = np.zeros((1, 1, 7, 7), np.uint8)
    image[0, 0, 3, 2] = 255
    images = np.repeat(image, count, 0)
    varied = PadCropFlip(pad, flips=True).apply(images, uniform(0, 0, numbers(count), 3))
    rows, columns = np.unravel_index(varied.reshape(count, -1).argmax(1), (7, 7))
    # Column 2 moves to columns 0 to 4, or 2 to 6 if flipped: columns 2 to 4 count twice.
    counts = np.zeros((7, 7))
    np.add.at(counts, (rows, columns), 1)
    seen = counts[1:6]
    expected = np.outer(np.full(5, 1 / 5), [0.1, 0.1, 0.2, 0.2, 0.2, 0.1, 0.1]) * count
    assert counts.sum() == seen.sum()
    assert ((seen - expected) ** 2 / expected).sum() < 34 + 6 * math.sqrt(68)  # 6 sigma away


def test_random_parts_have_the_wanted_areas_and_shapes():
    crop, count = RandomResizedCrop(0.08), 2000
    boxes = [crop.box(400, 300, draws) for draws in uniform(0, 0, numbers(count), crop.num_draws)]
    wide = np.array([box.right - box.left for box in boxes])
    high = np.array([box.bottom - box.top for box in boxes])
    assert min(b.left for b in boxes) >= 0 and max(b.right for b in boxes) <= 400
    assert min(b.top for b in boxes) >= 0 and max(b.bottom for b in boxes) <= 300
    shares, ratios = wide * high / 120_000, wide / high
    assert 0.075 < shares.min() < 0.12 and shares.max() > 0.9
    assert 0.73 < ratios.min() < 0.78 and 1.28 < ratios.max() < 1.36
    # The distribution is that of rejection sampling: large crops are rarer, wide ones more common.
    generator = np.random.default_rng(0)
    area = generator.uniform(0.08, 1, 200_000) * 120_000
    shape = np.exp(generator.uniform(-math.log(4 / 3), math.log(4 / 3), 200_000))
    fits = (np.sqrt(area * shape) <= 400) & (np.sqrt(area / shape) <= 300)
    assert abs(shares.mean() - area[fits].mean() / 120_000) < 0.025
    assert abs(np.log(ratios).mean() - np.log(shape[fits]).mean()) < 0.025
    lefts = np.array([box.left / (400 - w) for box, w in zip(boxes, wide, strict=True) if w < 390])
    assert abs(lefts.mean() - 0.5) < 0.04
    flips = [crop.flips(draws) for draws in uniform(0, 0, numbers(count), crop.num_draws)]
    assert abs(np.mean(flips) - 0.5) < 0.05


@pytest.mark.parametrize("size", [(1000, 10), (10, 1000), (1, 1), (3, 2)])
def test_part_of_a_strange_image_lies_within_it(size):
    crop = RandomResizedCrop(0.9)
    for draws in uniform(0, 0, numbers(20), crop.num_draws):
        box = crop.box(*size, draws)
        assert 0 <= box.left < box.right <= size[0] and 0 <= box.top < box.bottom <= size[1]


def test_no_part_fits_takes_the_largest_middle():
    crop = RandomResizedCrop(0.9)
    box = crop.box(1000, 10, uniform(0, 0, numbers(1), crop.num_draws)[0])
    assert box.bottom - box.top == 10 and box.right - box.left == pytest.approx(10 * 4 / 3)
    assert box.left + box.right == pytest.approx(1000)


def test_centre_is_that_of_the_resized_image():
    """Resizing the shorter side to 256 and cropping 224 x 224 is one box of the original."""
    box = CentreCrop(height=224, width=224, resize=256).box(1024, 512, np.empty(0))
    assert box == (512 - 224, 256 - 224, 512 + 224, 256 + 224)


def test_cut_scales_and_mirrors():
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:, 30:] = 200
    image = Image.fromarray(pixels)
    whole = np.asarray(cut(image, CentreCrop(10, 20, 20).box(60, 40, np.empty(0)), 10, 20, False))
    assert whole.shape == (10, 20, 3) and whole[:, 0].max() == 0 and whole[:, -1].min() == 200
    other = np.asarray(cut(image, CentreCrop(10, 20, 20).box(60, 40, np.empty(0)), 10, 20, True))
    assert (other == whole[:, ::-1]).all()
