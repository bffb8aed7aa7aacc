"""Settings of data that cannot work are rejected by name before anything is read."""

import re
from copy import deepcopy
from functools import cache

import pytest
import yaml

from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings import Config

MODEL = {"tokens": "gpt", "jsonl": "gpt"}
REFUSED = [
    ("idx", "data.path=null", "data.path, expected a folder"),
    ("image_folder", "data.path=null", "data.path, expected a folder"),
    ("cifar10", "data.path=''", "data.path, expected a folder"),
    ("tokens", "data.paths=[]", "data.paths, expected files or patterns"),
    ("jsonl", "data.paths=[]", "data.paths, expected files or patterns"),
    ("image_shards", "data.paths=[]", "data.paths, expected files or patterns"),
    ("tokens", "data.validation_fraction=1", "data.validation_fraction, expected 0 <= fraction"),
    (
        "jsonl",
        "data.separator=257",
        "data.separator, expected 0 or more and less than data.vocab_size=257",
    ),
    (
        "jsonl",
        "data.vocab_size=256",
        "data.separator, expected 0 or more and less than data.vocab_size=256",
    ),
    ("digits", "data.augment=resized_crop_flip", "data.augment, expected one of none, pad_crop"),
    ("image_folder", "data.augment=pad_crop", "data.augment, expected one of none, resized_crop"),
    ("digits", "data.mean=[0.1,0.2]", "data.mean, expected a number for each of 1 channels"),
    ("cifar10", "data.std=[1,0,1]", "data.std, expected deviations above 0"),
    ("cifar10", "data.height=28", "expected (3, 32, 32), the size of the images"),
    ("digits", "data.padding=8", "data.padding, expected less than an image's side"),
    ("cifar100", "data.label=both", "data.label, expected one of fine, coarse"),
    ("image_folder", "data.channels=2", "data.mean, expected a number for each of 2"),
    ("image_folder", "data.resize=200", "data.resize, expected at least data.height=224"),
    ("image_folder", "data.min_area=0", "data.min_area, expected more than 0, at most 1"),
    ("image_folder", "data.corrupt=go_on", "data.corrupt, expected one of stop, skip"),
    ("image_shards", "data.max_corrupt=0", "data.max_corrupt, expected at least 1"),
    ("digits", "data.workers=-1", "data.workers, expected 0 to 1024"),
    ("digits", "data.prefetch=0", "data.prefetch, expected at least 1"),
]
NEEDED = {
    "image_shards": ["data.paths=[a.tar]"],
    "tokens": ["data.paths=[a.bin]"],
    "jsonl": ["data.paths=[a.jsonl]"],
    "digits": [],
}


def test_a_setting_that_was_removed_names_what_to_do():
    with pytest.raises(ConfigError, match=r"data\.train_labels was removed"):
        compose_config(["model=vgg16", "data=idx", "data.path=/data", "data.train_labels=x"])


@cache
def composed(kind: str) -> Config:
    needed = NEEDED.get(kind, ["data.path=/data"])
    return compose_config([f"data={kind}", f"model={MODEL.get(kind, 'vgg16')}", *needed])


@pytest.mark.parametrize(
    ("kind", "override", "message"), REFUSED, ids=[f"{each[0]} {each[1]}" for each in REFUSED]
)
def test_settings_that_cannot_work_are_refused(kind, override, message):
    assert check_config(composed(kind), 1) == []
    config = deepcopy(composed(kind))
    name, value = override.removeprefix("data.").split("=")
    assert name in vars(config.data)
    setattr(config.data, name, yaml.safe_load(value))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_config(config, 1)
