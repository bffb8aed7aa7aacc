"""Checkpoints that are written while training goes on are those of the moment they were begun."""

import json
import threading

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.checkpoint import BackgroundSaver, saving
from gpipe_hpc.errors import CheckpointError


def trained(world, num_steps=2):
    layers = [LayerSpec(nn.Linear, 20, 20), LayerSpec(nn.BatchNorm1d, 20)]
    pipe = Pipeline(layers, nn.MSELoss(), microbatches=2, world=world)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    for _ in range(num_steps):
        step(pipe, optimizer)
    return pipe, optimizer


def step(pipe, optimizer):
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(pipe.steps_done))
    part = pipe.share(8)
    pipe.step(inputs[part], inputs[part])
    optimizer.step()


@pytest.fixture
def held(monkeypatch):
    """Return an event: until it is set, no file is written."""
    event = threading.Event()
    write = saving.write_files

    def write_later(*arguments):
        assert event.wait(30)
        return write(*arguments)

    monkeypatch.setattr(saving, "write_files", write_later)
    yield event
    event.set()


def contents(path):
    return {each.name: each.read_bytes() for each in path.iterdir()}


def test_it_writes_what_a_save_in_the_foreground_writes_and_nothing_later(tmp_path, held):
    def body(world):
        pipe, optimizer = trained(world)
        saver = BackgroundSaver(pipe)
        names = ["a"]
        saver.start(tmp_path / "behind", optimizer, {"corrupt": names})
        names.append("b")
        for _ in range(3):
            step(pipe, optimizer)
        assert saver.is_under_way and not saver.is_done
        assert not (tmp_path / "behind").exists()
        world.world_group.all_gather_object("all have looked")
        held.set()
        assert saver.finish() == tmp_path / "behind"
        assert not saver.is_under_way
        # In the foreground, at the same step.
        again, rule = trained(world)
        again.save(tmp_path / "front", rule, {"corrupt": ["a"]})

    run_on_threads(2, body)
    behind, front = contents(tmp_path / "behind"), contents(tmp_path / "front")
    assert behind.keys() == front.keys() and len(behind) >= 4
    assert {n: b for n, b in behind.items() if n.endswith("distcp")} == {
        n: b for n, b in front.items() if n.endswith("distcp")
    }
    told = [json.loads(part["gpipe_hpc.json"]) for part in (behind, front)]
    assert told[0]["extra"] == {"corrupt": ["a"]}
    for each in told:
        del each["files"], each["digest"]  # torch's list of tensors has a number of its own
    assert told[0]["steps_done"] == 2 and told[0] == told[1]


def test_it_loads_on_another_layout(tmp_path):
    def save(world):
        pipe, optimizer = trained(world)
        saver = BackgroundSaver(pipe)
        saver.start(tmp_path / "kept", optimizer, {"position": 16})
        step(pipe, optimizer)
        saver.finish()

    run_on_threads(2, save)
    layers = [LayerSpec(nn.Linear, 20, 20), LayerSpec(nn.BatchNorm1d, 20)]
    pipe = Pipeline(layers, nn.MSELoss(), microbatches=2)
    assert pipe.load(tmp_path / "kept", torch.optim.AdamW(pipe.parameters())) == {"position": 16}
    assert pipe.steps_done == 2


def test_a_second_one_waits_for_the_first_and_uses_its_memory(tmp_path):
    pipe, optimizer = trained(None)
    saver = BackgroundSaver(pipe)
    places = []
    for number in range(3):
        saver.start(tmp_path / str(number), optimizer)
        assert number == 0 or (tmp_path / str(number - 1)).exists()
        tensors = saver._job.begun.contents.tensors
        places.append({name: tensor.data_ptr() for name, tensor in tensors.items()})
        step(pipe, optimizer)
    saver.finish()
    assert places[0] == places[1] == places[2]
    assert (tmp_path / "2").exists()


def test_what_goes_wrong_on_one_rank_is_told_by_all_when_it_is_finished(tmp_path, monkeypatch):
    def fail(tensors, folder, rank):
        raise OSError(28, "No space left on device")

    write = saving.write_files
    monkeypatch.setattr(
        saving, "write_files", lambda *all_: (fail if all_[2] == 1 else write)(*all_)
    )

    def body(world):
        pipe, optimizer = trained(world)
        saver = BackgroundSaver(pipe)
        saver.start(tmp_path / "kept", optimizer)
        step(pipe, optimizer)
        with pytest.raises(CheckpointError, match=r"rank 1 on \S+: checkpoint .* No space left"):
            saver.finish()
        assert not saver.is_under_way and saver.finish() is None

    run_on_threads(2, body)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_refused_at_once(tmp_path):
    pipe, optimizer = trained(None)
    saver = BackgroundSaver(pipe)
    pipe.save(tmp_path / "kept")
    with pytest.raises(CheckpointError, match="already exists"):
        saver.start(tmp_path / "kept", optimizer)
    assert not saver.is_under_way


def test_who_gives_up_does_not_wait_for_a_disk_that_hangs(tmp_path, held):
    pipe, optimizer = trained(None)
    saver = BackgroundSaver(pipe)
    saver.start(tmp_path / "kept", optimizer)
    saver.give_up(limit_s=0.05)
    assert not saver.is_under_way and not (tmp_path / "kept").exists()
