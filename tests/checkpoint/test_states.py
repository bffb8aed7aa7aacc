"""What modules keep by get_extra_state: plain values and tensors, on any layout, no pickle."""

import json
import math
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.checkpoint.states import decode, encode, tensor_names
from gpipe_hpc.errors import CheckpointError


class Keeper(nn.Module):
    """A layer within a layer, with a state of its own."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def forward(self, inputs):
        return inputs

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


class Holder(nn.Linear):
    """A layer that holds one."""

    def __init__(self, state):
        super().__init__(2, 2)
        self.inner = Keeper(state)


def pipeline(states, world=None):
    return Pipeline([LayerSpec(Holder, state) for state in states], nn.MSELoss(), world=world)


def states_of(pipe):
    return {name: m.state for s in pipe.stages.values() for name, m in s.extra_states().items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_it_is_saved_and_restored_under_its_global_name(tmp_path, num_ranks):
    """It was not saved: the module went on with what it was built with."""
    numbers = [1, 2, 3, 4]

    def save(world):
        pipe = pipeline([{"n": n, "t": torch.full((2,), float(n))} for n in numbers], world)
        return pipe.save(tmp_path / "kept")

    def load(world):
        pipe = pipeline([None] * 4, world)
        pipe.load(tmp_path / "kept")
        return states_of(pipe)

    run_on_threads(2, save)
    found = {name: s for part in run_on_threads(num_ranks, load) for name, s in part.items()}
    assert found.keys() == {f"layers.{i}.inner._extra_state" for i in range(4)}
    for index, number in enumerate(numbers):
        state = found[f"layers.{index}.inner._extra_state"]
        assert state["n"] == number
        assert torch.equal(state["t"], torch.full((2,), float(number)))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        math.inf,
        "text",
        [],
        (),
        {},
        {"tensor": "x", "on_cpu": True},
        {"tuple": [1]},
        {"dict": [[1, 2]]},
        {1: "int", "1": "text", 1.5: None, None: (1, [2, (3,)])},
        {(1, "a"): {2}, frozenset([1]): b"bytes", 1j: bytearray(b"more")},
        [OrderedDict(b=1, a=2), Counter({2: 1}), deque([1, 2], maxlen=2)],
        [np.float32(0.1), np.bool_(True), np.datetime64("2026-01-01")],
        [[torch.ones(2, dtype=torch.int8)], {"a": (torch.zeros(()),)}],
    ],
)
def test_every_plain_value_comes_back_as_it_was(value):
    written, tensors = encode("layers.0._extra_state", value)
    again = json.loads(json.dumps(written))
    assert sorted(name for name, _ in tensor_names(again)) == sorted(tensors)
    found = decode(again, tensors)
    if tensors:
        assert torch.equal(found[0][0], value[0][0]) and found[0][0].dtype == torch.int8
        assert torch.equal(found[1]["a"][0], value[1]["a"][0])
    else:
        assert found == value and repr(found) == repr(value)


class Text(str):
    """What JSON would give back as another type."""


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), "builtins.object at value"),
        ({"a": [1, {Text("x")}]}, r"Text at value\['a'\]\[1\]\[0\]"),
        ({(1, print): 2}, r"builtin_function_or_method at value, key .*\[1\]"),
        ({"n": 10**5000}, r"a number of 16610 bits at value\['n'\]"),
        (Text("x"), "Text at value"),
        (torch.Size([1]), "torch.Size at value"),
        (print, "builtin_function_or_method at value"),
    ],
)
def test_other_values_are_refused_by_all_before_anything_is_written(tmp_path, value, where):
    def body(world):
        pipe = pipeline([None, value], world)
        with pytest.raises(CheckpointError, match=rf"layers\.1\.inner.*{where}; convert it"):
            pipe.save(tmp_path / "kept")
        return "told"

    assert run_on_threads(2, body) == ["told", "told"]
    assert not list(tmp_path.iterdir())


def test_a_replica_writes_it_once(tmp_path):
    """Copies may differ; one writes both the values and their tensors."""

    def body(world):
        state = {"rank": world.rank, "tensor": torch.tensor([world.rank] * 9)}
        pipe = Pipeline([LayerSpec(Holder, state)], nn.MSELoss(), replicas=2, world=world)
        pipe.save(tmp_path / "kept")
        pipe.load(tmp_path / "kept")
        return states_of(pipe)["layers.0.inner._extra_state"]

    for state in run_on_threads(2, body):
        assert state["rank"] == 0 and state["tensor"].tolist() == [0] * 9
