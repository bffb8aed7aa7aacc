"""Checkpoints that cannot be written or read: what is said, and what is left."""

import os
import shutil
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import CheckpointError

# What torch's zip writer says of a full disk.
FULL = "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"


def pipeline(world=None):
    return Pipeline([LayerSpec(nn.Linear, 100, 100) for _ in range(2)], nn.MSELoss(), world=world)


@pytest.fixture
def steps(tmp_path):
    """Return the folders of a run's checkpoints after 8, 9, 10 and 11 steps, oldest first."""
    pipe = pipeline()
    paths = []
    for step in (8, 9, 10, 11):
        pipe.steps_done = step
        paths.append(pipe.save(tmp_path / f"step_{step}"))
    shutil.copytree(paths[1], tmp_path / "abandoned_step_9")
    shutil.copytree(paths[1], tmp_path / "step_9.partial")
    return paths


def refusals(call, num_ranks=1):
    """Return the text of the CheckpointError on each rank."""

    def body(world):
        pipe = pipeline(world)
        with pytest.raises(CheckpointError) as caught:
            call(pipe)
        return str(caught.value)

    return run_on_threads(num_ranks, body)


@pytest.mark.parametrize("num_bytes", [0, 50, 300])
def test_damaged_metadata_is_named_by_every_rank(steps, num_bytes):
    """It ended in a raw UnpicklingError."""
    os.truncate(steps[2] / ".metadata", num_bytes)
    for text in refusals(lambda pipe: pipe.load(steps[2]), 2):
        assert "the file .metadata is damaged: " in text
        assert text.endswith(f"resume from an older one: checkpoint.resume={steps[1]}")


@pytest.mark.parametrize("name", ["gpipe_hpc.json", "__0_0.distcp"])
def test_a_damaged_checkpoint_names_the_newest_older_whole_one(steps, name):
    os.truncate(steps[2] / name, 0)
    os.truncate(steps[1] / ".metadata", 50)
    older = steps[0] if name.endswith("distcp") else steps[3]
    (text,) = refusals(lambda pipe: pipe.load(steps[2]))
    assert text.endswith(f"resume from an older one: checkpoint.resume={older}")
    assert ": ;" not in text


def test_without_an_older_one_there_is_none_to_name(steps):
    os.truncate(steps[0] / "__0_0.distcp", 0)
    (text,) = refusals(lambda pipe: pipe.load(steps[0]))
    assert text.endswith("0 bytes instead of 87,076; check the disk, or load another checkpoint")


def test_a_folder_that_cannot_be_made_is_refused_by_every_rank(tmp_path):
    """It was a raw error of the operating system on the first."""
    (tmp_path / "file").write_text("")
    for text in refusals(lambda pipe: pipe.save(tmp_path / "file" / "x"), 2):
        assert "the folder cannot be created: [Errno" in text


def test_a_name_that_is_taken_is_refused_by_every_rank(steps):
    for text in refusals(lambda pipe: pipe.save(steps[0]), 2):
        assert "already exists" in text


def test_extra_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    (text,) = refusals(lambda pipe: pipe.save(tmp_path / "kept", extra={"lr": torch.ones(1)}))
    assert "must have a type that can be saved and loaded exactly" in text
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_in_bytes_and_nothing_is_left(tmp_path, monkeypatch):
    """Torch says "unexpected pos 704 vs 598"; 0.081 MB are two layers of 10100 numbers."""

    def write(*_):
        raise RuntimeError(FULL)

    usage = namedtuple("usage", ["total", "used", "free"])(10**9, 10**9 - 3000, 3000)
    monkeypatch.setattr(FileSystemWriter, "write_data", write)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    (text,) = refusals(lambda pipe: pipe.save(tmp_path / "kept"))
    assert FULL in text
    assert "has 0.003 MB free and the checkpoint takes about 0.081 MB" in text
    assert list(tmp_path.iterdir()) == []
