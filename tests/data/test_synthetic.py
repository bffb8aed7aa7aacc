"""Tests of synthetic data, whose samples depend only on their index."""

import pytest
import torch

from gpipe_hpc.data import open_data
from gpipe_hpc.data.synthetic import (
    SyntheticImagesConfig,
    SyntheticMasksConfig,
    SyntheticTokensConfig,
    SyntheticVectorsConfig,
)
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings import DataConfig

TOKENS = SyntheticTokensConfig(num_samples=40, num_validation_samples=7, seq_len=9, vocab_size=50)
VECTORS = SyntheticVectorsConfig(num_samples=400, num_validation_samples=7, width=5, num_classes=3)
IMAGES = SyntheticImagesConfig(
    num_samples=400, num_validation_samples=7, channels=2, height=4, width=5, num_classes=3
)
MASKS = SyntheticMasksConfig(
    num_samples=200, num_validation_samples=7, channels=2, height=12, width=9, num_classes=3
)
EVERY_KIND = pytest.mark.parametrize(
    "config", [TOKENS, VECTORS, IMAGES, MASKS], ids=["tokens", "vectors", "images", "masks"]
)


def test_tokens_count_up_by_a_stride():
    data = open_data(TOKENS).train
    inputs, targets = data.read_inputs([3, 8]), data.read_targets([3, 8])
    assert inputs.shape == targets.shape == (2, 9)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    strides = (targets - inputs) % 50
    assert (strides == strides[:, :1]).all() and strides[0, 0] != strides[1, 0]


@EVERY_KIND
def test_sample_depends_on_its_number_alone(config):
    data = open_data(config).train
    for read in (data.read_inputs, data.read_targets):
        together = read(range(20))
        apart = torch.cat([read([index]) for index in reversed(range(20))]).flip(0)
        assert torch.equal(together, apart)
    assert (data.num_samples, open_data(config).validation.num_samples) == (config.num_samples, 7)


@EVERY_KIND
def test_splits_and_seeds_differ(config):
    train, validation = open_data(config).train, open_data(config).validation
    assert not torch.equal(train.read_inputs(range(7)), validation.read_inputs(range(7)))
    other = open_data(type(config)(**vars(config) | {"seed": 1}))
    assert not torch.equal(train.read_inputs(range(7)), other.train.read_inputs(range(7)))
    assert len({each.digest() for each in (train, validation, other.train)}) == 3


def test_vectors_are_uniform_and_classes_all_used():
    data = open_data(VECTORS).train
    vectors, classes = data.read_inputs(range(400)), data.read_targets(range(400))
    assert vectors.dtype == torch.float32 and vectors.shape == (400, 5)
    assert vectors.min() >= -1 and vectors.max() < 1
    assert abs(vectors.mean()) < 0.06 and abs(vectors.var() - 1 / 3) < 0.04
    assert set(classes.tolist()) == {0, 1, 2}


def test_classes_come_from_one_linear_map():
    """A linear classifier fitted to the first samples classifies later samples correctly."""
    data = open_data(VECTORS).train
    vectors, classes = data.read_inputs(range(400)), data.read_targets(range(400))
    wanted = torch.nn.functional.one_hot(classes, 3).float() - 1 / 3
    fitted = torch.linalg.lstsq(vectors[:300], wanted[:300]).solution
    right = (vectors[300:] @ fitted).argmax(1) == classes[300:]
    assert right.float().mean() > 0.85


def test_images_are_in_range_and_classes_all_used():
    data = open_data(IMAGES).train
    images, classes = data.read_inputs(range(400)), data.read_targets(range(400))
    assert images.dtype == torch.float32 and images.shape == (400, 2, 4, 5)
    assert classes.dtype == torch.int64 and classes.shape == (400,)
    assert images.min() >= -1 and images.max() < 1
    assert min(classes.bincount(minlength=3).tolist()) > 100


def test_images_are_a_picture_of_their_class_and_noise():
    """The means of the classes differ, and training and validation have the same means."""
    train, validation = open_data(IMAGES).train, open_data(IMAGES).validation
    images, classes = train.read_inputs(range(400)), train.read_targets(range(400))
    means = torch.stack([images[classes == each].mean(0) for each in range(3)])
    assert (means[0] - means[1]).abs().max() > 0.3 and (means[1] - means[2]).abs().max() > 0.3
    noise = images - means[classes]
    assert abs(noise.var() - 1 / 12) < 0.01
    distances = (validation.read_inputs(range(7))[:, None] - means).square().sum((2, 3, 4))
    assert torch.equal(distances.argmin(1), validation.read_targets(range(7)))


def test_masks_are_rectangles_of_one_class():
    data = open_data(MASKS).train
    masks = data.read_targets(range(200))
    assert masks.dtype == torch.int64 and masks.shape == (200, 12, 9)
    for mask in masks:
        rows, columns = (mask.amax(d) > 0 for d in (1, 0))
        assert 3 <= rows.sum() <= 9 and 2 <= columns.sum() <= 6
        inside = mask[rows][:, columns]
        assert (inside == inside[0, 0]).all() and inside[0, 0] in (1, 2)
        for line in (rows, columns):
            assert line.diff().sum() <= 2, "one piece"
    assert (masks > 0).any(0).all(), "anywhere in the image"
    assert (masks.amax((1, 2)) == 1).float().mean() == pytest.approx(0.5, abs=0.15)


def test_masked_images_are_as_bright_as_their_classes():
    data = open_data(MASKS).train
    images, masks = data.read_inputs(range(200)), data.read_targets(range(200))
    assert images.dtype == torch.float32 and images.shape == (200, 2, 12, 9)
    assert images.min() >= -1 and images.max() < 1
    for number, level in enumerate([-0.5, 0.0, 0.5]):
        pixels = images.movedim(1, -1)[masks == number]
        assert pixels.mean() == pytest.approx(level, abs=0.02)
        assert pixels.var() == pytest.approx(1 / 12, abs=0.01)


def test_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="DataConfig provides no samples"):
        open_data(DataConfig())
