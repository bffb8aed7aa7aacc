"""Tests of the identity of data: resuming with other data raises an error or logs a warning."""

import json
from pathlib import Path

import numpy as np
import pytest

from gpipe_hpc.data import ShuffledSampler, differences, identify, open_data
from gpipe_hpc.data.dataset import samples_that_fit
from gpipe_hpc.data.images.cifar import CifarConfig
from gpipe_hpc.data.images.folder import ImageFolderConfig
from gpipe_hpc.data.images.idx import IdxConfig
from gpipe_hpc.data.images.shards import ImageShardsConfig
from gpipe_hpc.data.jsonl import JsonLinesConfig
from gpipe_hpc.data.position import check_data, continues_data
from gpipe_hpc.data.synthetic import (
    SyntheticImagesConfig,
    SyntheticMasksConfig,
    SyntheticTokensConfig,
    SyntheticVectorsConfig,
)
from gpipe_hpc.data.text import TextConfig, TokensConfig
from gpipe_hpc.errors import CheckpointError, ConfigError
from gpipe_hpc.settings import TrainConfig


def identity(data, **train) -> dict:
    """Return the identity of data after a round trip through JSON, as stored in a checkpoint."""
    settings = TrainConfig(**train)
    return json.loads(json.dumps(identify(open_data(data, settings.seed), data, settings)))


def text(*paths: Path, **settings) -> TextConfig:
    return TextConfig([str(path) for path in paths], **{"seq_len": 5} | settings)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


LETTERS = bytes(range(65, 91)) * 40


def test_a_copy_elsewhere_is_the_same_data(tmp_path):
    """Folders and modification times do not matter, so a run may resume on another cluster."""
    first, second = write(tmp_path / "a" / "x", LETTERS), write(tmp_path / "b" / "x", LETTERS)
    assert differences(identity(text(first)), identity(text(second))) == []
    assert differences(identity(text(first)), identity(text(first, workers=3))) == []


@pytest.mark.parametrize(
    "kind",
    [SyntheticTokensConfig, SyntheticVectorsConfig, SyntheticImagesConfig, SyntheticMasksConfig],
)
def test_synthetic_samples_do_not_depend_on_how_they_are_read(kind):
    """Their digest contained data.workers: a run with another number could not be resumed."""
    before, now = identity(kind(num_samples=64)), identity(kind(num_samples=64, workers=2))
    assert differences(before, now) == []
    assert before["validation"] == now["validation"]
    assert differences(before, identity(kind(num_samples=64, num_validation_samples=9))) == []
    assert differences(before | {"digest": "of an older version"}, now) == []
    other = differences(before, identity(kind(num_samples=64, seed=1)))
    assert other == ["data.seed: was 0, is 1"]


def test_a_synthetic_setting_is_named_even_if_the_samples_looked_at_are_equal():
    masked = {"objective": "masked", "num_samples": 64, "seq_len": 4}
    before = identity(SyntheticTokensConfig(**masked, mask_fraction=0.3))
    now = identity(SyntheticTokensConfig(**masked, mask_fraction=0.3 + 1e-9))
    assert before["content"] == now["content"]
    (found,) = differences(before, now)
    assert found.startswith("data.mask_fraction: was 0.3, is 0.30000000")


@pytest.mark.parametrize(
    ("data", "train", "expected"),
    [
        ({"seq_len": 7}, {}, ["data.seq_len: was 5, is 7", "samples: was 197, is 141"]),
        ({"validation_fraction": 0.1}, {}, ["data.validation_fraction: was 0.05, is 0.1"]),
        ({}, {"seed": 3}, ["train.seed: was 0, is 3"]),
        ({}, {"batch_size": 8}, ["train.batch_size: was 32, is 8"]),
    ],
)
def test_what_differs_is_named(tmp_path, data, train, expected):
    path = write(tmp_path / "x", LETTERS)
    found = differences(identity(text(path)), identity(text(path, **data), **train))
    assert found[: len(expected)] == expected


def test_other_content_of_the_same_size_is_noticed(tmp_path):
    path = write(tmp_path / "x", LETTERS)
    before = identity(text(path))
    write(path, LETTERS.lower())
    assert differences(before, identity(text(path))) == ["the content of the data"]


def test_another_file_is_noticed(tmp_path):
    path = write(tmp_path / "x", LETTERS)
    before = identity(text(path))
    added = write(tmp_path / "y", LETTERS)
    assert differences(before, identity(text(path, added)))[0].startswith("samples: was 197, is")


def test_another_kind_is_named(tmp_path):
    np.save(tmp_path / "x.npy", np.frombuffer(LETTERS, np.uint8))
    tokens = TokensConfig([f"{tmp_path}/x.npy"], seq_len=5, vocab_size=256)
    other = differences(identity(SyntheticTokensConfig(seq_len=5)), identity(tokens))
    assert other == ["kind: was SyntheticTokensConfig, is TokensConfig"]


COLOUR = {"mean": [0.5] * 3, "std": [0.5] * 3}


def of_folder(files, root):
    return ImageFolderConfig(str(files.write_folder(root)), num_classes=3, **COLOUR)


def of_shards(files, root):
    return ImageShardsConfig([str(files.write_shards(root))], validation_percent=0, **COLOUR)


def of_cifar(files, root):
    files.write_cifar10(root)
    return CifarConfig(str(root), **COLOUR)


def of_idx(files, root):
    files.write_idx(root)
    return IdxConfig(str(root), height=8, width=8, mean=[0.5], std=[0.5])


def of_jsonl(files, root):
    files.write_jsonl(root / "a.jsonl", [f"text {number:03}" for number in range(40)])
    return JsonLinesConfig([f"{root}/a.jsonl"], validation_percent=0, seq_len=7)


# Changes one byte, at index `place`, in each file that matches `pattern`.
@pytest.mark.parametrize(
    ("make", "pattern", "place"),
    [
        (of_folder, "train/*/*", -30),
        (of_shards, "*.tar", 700),
        (of_cifar, "data_batch_1.bin", 100),
        (of_idx, "train-images*", 100),
        (of_jsonl, "a.jsonl", 12),
    ],
)
def test_other_content_under_the_same_names_is_noticed(files, tmp_path, make, pattern, place):
    """Changed bytes are detected by hashing a few samples, although names and sizes are equal."""
    config = make(files, tmp_path)
    before = identity(config)
    assert differences(before, identity(config)) == []
    for path in tmp_path.glob(pattern):
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
    assert differences(before, identity(config)) == ["the content of the data"]


def test_checkpoint_of_an_older_version_is_taken_with_a_warning(tmp_path, caplog):
    now = identity(text(write(tmp_path / "x", LETTERS)))
    check_data(tmp_path, {"position": 9}, now, "same")
    assert "did not record the data" in caplog.text
    assert continues_data({"position": 9}, now, "new")


def test_other_validation_is_told_only(tmp_path, caplog):
    path, held = write(tmp_path / "x", LETTERS), write(tmp_path / "v", LETTERS)
    before = identity(text(path, validation_paths=[str(held)]))
    write(held, LETTERS[:-50])
    now = identity(text(path, validation_paths=[str(held)]))
    check_data(tmp_path, {"position": 9, "data": before}, now, "same")
    assert "the validation samples have changed" in caplog.text


def test_order_is_that_of_the_version_that_checkpoints_name():
    """If the sampler's order changes, `order` in the identity must be increased."""
    assert identity(SyntheticTokensConfig(seq_len=5))["order"] == 1
    assert ShuffledSampler(10, 10, seed=0).batch(0)[0] == [2, 3, 8, 7, 4, 1, 0, 5, 9, 6]


def test_the_refusal_says_what_to_do(tmp_path):
    path = write(tmp_path / "x", LETTERS)
    before, now = identity(text(path)), identity(text(path), batch_size=8, seed=1)
    message = (
        r"train\.seed: was 0, is 1; train\.batch_size: was 32, is 8; "
        r".*checkpoint\.data=new .*checkpoint\.data=any to continue after 9"
    )
    with pytest.raises(CheckpointError, match=message):
        check_data(tmp_path, {"position": 9, "data": before}, now, "same")


def test_samples_that_no_memory_holds_are_refused():
    """Regression: data.seq_len=2**31 gave a traceback of NumPy."""
    config = SyntheticTokensConfig(seq_len=2**55, vocab_size=16, num_samples=4)
    with pytest.raises(ConfigError, match=r"data: samples do not fit"):
        identify(open_data(config), config, TrainConfig())


def test_other_failures_of_a_read_are_what_they_were():
    with pytest.raises(RuntimeError, match=r"^another$"), samples_that_fit():
        raise RuntimeError("another")
    with pytest.raises(ConfigError, match="do not fit"), samples_that_fit():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")
