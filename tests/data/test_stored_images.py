"""Tests of IDX files, CIFAR and scikit-learn's digits: values read, and damaged files."""

import gzip
import math
import struct
import sys
import tracemalloc

import numpy as np
import pytest
import torch

from gpipe_hpc.data import open_data
from gpipe_hpc.data.images.cifar import Cifar100Config, CifarConfig
from gpipe_hpc.data.images.digits import DigitsConfig
from gpipe_hpc.data.images.idx import FashionMnistConfig, IdxConfig, IdxFile
from gpipe_hpc.errors import DataError


def idx(folder, **settings) -> IdxConfig:
    size = {"height": 8, "width": 8, "mean": [0.0], "std": [1.0]}
    return IdxConfig(str(folder), **size | settings)


def cifar(folder, kind=CifarConfig, **settings):
    return kind(str(folder), **{"mean": [0.0] * 3, "std": [1.0] * 3} | settings)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_idx_gives_what_was_written(files, tmp_path, packed):
    files.write_idx(tmp_path, 20, 6, packed=packed)
    source = open_data(idx(tmp_path))
    assert (source.train.num_samples, source.validation.num_samples) == (20, 6)
    images = source.train.read_inputs([13, 2])
    assert images.shape == (2, 1, 8, 8) and images.dtype == torch.float32
    assert torch.allclose(images, (torch.tensor([13.0, 2.0]) / 255).reshape(2, 1, 1, 1))
    targets = source.train.read_targets([13, 2])
    assert targets.tolist() == [3, 2] and targets.dtype == torch.int64
    assert source.loss == "classification"


def test_pixels_are_normalised(files, tmp_path):
    files.write_idx(tmp_path, 20, 6)
    images = open_data(idx(tmp_path, mean=[0.5], std=[0.25])).train.read_inputs([10])
    assert torch.allclose(images, torch.tensor((10 / 255 - 0.5) / 0.25))


def test_sample_is_the_same_alone_and_in_company(files, tmp_path):
    files.write_cifar10(tmp_path)
    data = open_data(cifar(tmp_path, mean=[0.49, 0.48, 0.44], std=[0.24, 0.23, 0.26])).train
    together = data.read_inputs(range(20))
    apart = torch.cat([data.read_inputs([index]) for index in range(20)])
    assert torch.equal(together, apart)


def test_baseline_is_the_cost_of_guessing_by_frequency(files, tmp_path):
    files.write_idx(tmp_path, 20, 1)  # each class twice, so all smoothed frequencies are 1/10
    assert open_data(idx(tmp_path)).baseline() == pytest.approx(math.log(10))
    files.write_idx(tmp_path, 20, 0)
    assert open_data(idx(tmp_path)).baseline() is None


def test_idx_of_another_format_is_named(files, tmp_path):
    made = files.write_idx(tmp_path)
    made.train_images.write_bytes(b"\x80\x04" + made.train_images.read_bytes())  # like a pickle
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte .*00 00 08 03, got '80"):
        open_data(idx(tmp_path))
    made.train_images.write_bytes(made.train_labels.read_bytes())
    with pytest.raises(DataError, match=r"not an IDX file .*3 dimensions"):
        open_data(idx(tmp_path))


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"x"], ids=["cut", "longer"])
def test_idx_of_another_length_is_named(files, tmp_path, change):
    made = files.write_idx(tmp_path)
    content = made.train_images.read_bytes()
    made.train_images.write_bytes(change(content))
    expected = rf"train-images.*expected {len(content)} bytes"
    with pytest.raises(DataError, match=expected):
        open_data(idx(tmp_path))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda content: gzip.compress(content[:-1]),
            "fewer than the 1280 bytes",
        ),
        (
            lambda content: gzip.compress(content + b"x"),
            "more than the 1280 bytes",
        ),
        (lambda content: gzip.compress(content)[:-9], "ended before"),
        (lambda content: gzip.compress(content)[:-8] + bytes(8), "CRC"),
    ],
    ids=["fewer", "more", "cut", "checksum"],
)
def test_damaged_gz_is_named_at_the_first_read(files, tmp_path, spoil, words):
    made = files.write_idx(tmp_path, 20, packed=True)
    made.train_images.write_bytes(spoil(gzip.decompress(made.train_images.read_bytes())))
    source = open_data(idx(tmp_path))
    with pytest.raises(DataError, match=rf"train-images-idx3-ubyte\.gz .*{words}"):
        source.train.read_inputs([0])


def test_header_that_promises_terabytes_allocates_nothing(files, tmp_path):
    made = files.write_idx(tmp_path, packed=True)
    header = files.idx_bytes(np.zeros((0, 8, 8)))[:4] + b"\xff\xff\xff\xff" * 3
    made.train_images.write_bytes(gzip.compress(header))
    with pytest.raises(DataError, match="does not match its header"):
        open_data(idx(tmp_path))


def test_idx_of_another_size_says_which_settings(files, tmp_path):
    files.write_idx(tmp_path, size=8)
    with pytest.raises(DataError, match=r"\(1, 8, 8\), .*\(1, 9, 8\)"):
        open_data(idx(tmp_path, height=9))


def test_labels_of_another_set_are_refused(files, tmp_path):
    made = files.write_idx(tmp_path, 20, 6)
    made.t10k_labels.write_bytes(made.train_labels.read_bytes())
    with pytest.raises(DataError, match=r"t10k-labels.* 6 labels, got 20"):
        open_data(idx(tmp_path))


def test_class_that_is_none_is_refused(files, tmp_path):
    files.write_idx(tmp_path)
    source = open_data(idx(tmp_path, num_classes=7))
    with pytest.raises(DataError, match=r"train-labels.*expected 0 to 6, got 7"):
        source.train.read_targets([0])


def test_missing_files_say_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte nor .*\.gz"):
        open_data(idx(tmp_path))
    with pytest.raises(DataError, match="dataset-fashion-mnist"):
        open_data(FashionMnistConfig(str(tmp_path / "none")))
    with pytest.raises(DataError, match="dataset-fashion-mnist"):
        open_data(FashionMnistConfig(str(tmp_path)))


def test_cifar10_gives_what_was_written(files, tmp_path):
    parts = files.write_cifar10(tmp_path, 4)
    source = open_data(cifar(tmp_path))
    assert (source.train.num_samples, source.validation.num_samples) == (20, 4)
    images = source.train.read_inputs([5, 19, 0])  # files 2, 5 and 1
    written = np.stack([parts[1][1], parts[4][3], parts[0][0]])
    assert torch.allclose(images, torch.from_numpy(written / 255).float())
    assert source.train.read_targets([5, 19, 0]).tolist() == [2, 7, 0]
    assert source.validation.read_targets(range(4)).tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize(("label", "expected"), [("fine", [7, 14]), ("coarse", [1, 2])])
def test_cifar100_has_two_labels(files, tmp_path, label, expected):
    files.write_cifar100(tmp_path)
    config = cifar(tmp_path, Cifar100Config, label=label, num_classes=100)
    assert open_data(config).train.read_targets([1, 2]).tolist() == expected


def test_cifar_cut_short_is_named(files, tmp_path):
    files.write_cifar10(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_3\.bin .*3073"):
        open_data(cifar(tmp_path))
    path.unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin cannot be read"):
        open_data(cifar(tmp_path))


def test_cifar_with_a_class_that_is_none_is_named(files, tmp_path):
    files.write_cifar10(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(b"\x0b" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"data_batch_2\.bin .*got 11"):
        open_data(cifar(tmp_path)).train.read_targets([0])


def test_digits_are_split_by_their_number():
    from sklearn.datasets import load_digits

    scans = load_digits()
    source = open_data(DigitsConfig(mean=[0.0], std=[1.0]))
    assert (source.train.num_samples, source.validation.num_samples) == (1438, 359)
    held = source.validation.read_inputs([0, 1])  # scans 4 and 9
    expected = torch.from_numpy(scans.images[[4, 9], None] / 16).float()
    assert (held - expected).abs().max() <= 0.5 / 255 + 1e-6
    assert source.validation.read_targets(range(359)).tolist() == scans.target[4::5].tolist()
    assert source.train.read_targets(range(6)).tolist() == scans.target[[0, 1, 2, 3, 5, 6]].tolist()
    assert source.baseline() == pytest.approx(math.log(10), abs=0.03)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install scikit-learn"):
        open_data(DigitsConfig(mean=[0.0], std=[1.0]))


def test_training_images_are_shifted_and_others_are_not(files, tmp_path):
    files.write_cifar10(tmp_path, 4)
    plain = open_data(cifar(tmp_path))
    varied = open_data(cifar(tmp_path, augment="pad_crop_flip"), seed=3)
    indices = list(range(4))
    assert torch.equal(
        varied.validation.read_inputs(indices), plain.validation.read_inputs(indices)
    )
    assert not torch.equal(varied.train.read_inputs(indices), plain.train.read_inputs(indices))
    epochs = {varied.train.read_inputs(indices, epoch).sum().item() for epoch in range(4)}
    assert len(epochs) == 4


def test_header_of_a_packed_file_allocates_nothing(tmp_path):
    """A compressed file of 100 KB could contain the 60 MB that its header claims, but does not."""
    header = struct.pack(">BBBB3I", 0, 0, 8, 3, 20, 1, 3_000_000)
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(header + np.random.default_rng(0).bytes(100_000)))
    file = IdxFile.open(path, 3)
    tracemalloc.start()
    with pytest.raises(DataError, match="fewer than the 60000000 bytes"):
        file.read()
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()
