"""A checkpoint of format 2 and copies in memory that an earlier version wrote are read for ever.

Four ranks (2 stages x 2 replicas, `outer.shard=flat`, buckets of 100 bytes) wrote both after three
steps of AdamW. format_2.json holds their weights and moments at that moment, and what they came to
after two steps more on one rank that trained all five, which is equal to 1e-10.
"""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.checkpoint.in_memory import open_copies
from tests.support import mean_square

HERE = Path(__file__).parent
CHECKPOINT = HERE / "format_2"
COPIES = HERE / "copies_2"
EXPECTED = json.loads((HERE / "format_2.json").read_text())
EXTRA = {"position": 24, "corrupt": [], "rate": 0.1, "texts": {"ß": [None, True]}}
FLAT = {"shard": "flat", "bucket_bytes": 100}
WIDTH = 3


class Offset(nn.Module):
    """A layer whose state is a buffer, an extra state and no parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.zeros(WIDTH, dtype=torch.float64))
        self.scale = 1.0

    def forward(self, inputs):
        return inputs * self.scale + self.offset

    def get_extra_state(self):
        return {"scale": self.scale, "shape": (WIDTH, None)}

    def set_extra_state(self, state):
        assert state["shape"] == (WIDTH, None)
        self.scale = state["scale"]


def opened(world, stages=2, outer=FLAT):
    """Return a pipeline with a tied weight and each kind of state, and its optimizer."""
    tied = LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False, dtype=torch.float64)
    tied = tied.tied({"weight": "shared"})
    norm = LayerSpec(nn.BatchNorm1d, WIDTH, dtype=torch.float64)
    pipe = Pipeline(
        [tied, norm, LayerSpec(Offset), LayerSpec(nn.Tanh), tied],
        mean_square,
        stages=stages,
        replicas=world.size // stages,
        microbatches=4 * stages // world.size,
        seed=3,
        world=world,
        outer=outer,
    )
    return pipe, pipe.optimizer(lambda groups: torch.optim.AdamW(groups, lr=0.1))


def train(pipe, optimizer, steps):
    losses = []
    for step in steps:
        batch = torch.arange(24.0, dtype=torch.float64).reshape(8, WIDTH).sin() * (step + 1)
        part = pipe.share(8)
        losses.append(pipe.step(batch[part], batch.flip(1)[part]).loss)
        optimizer.step()
        for stage in pipe.stages.values():
            for module in stage.extra_states().values():
                module.scale += 0.25
                module.offset += 0.5
    return losses


def state_of(pipe, optimizer):
    """Return all tensors by name; the moments are whole if the optimizer is."""
    found = {name: p.tolist() for name, p in pipe.named_parameters()}
    for stage in pipe.stages.values():
        found |= {name: b.tolist() for name, b in stage.named_buffers().items()}
        found |= {name: module.scale for name, module in stage.extra_states().items()}
    for name, parameter in pipe.named_parameters():
        state = optimizer.state.get(parameter, {})
        found |= {f"{name}:{key}": torch.as_tensor(x).tolist() for key, x in state.items()}
    return found


def united(parts):
    return {name: value for part in parts for name, value in part.items()}


def assert_close(found, expected):
    assert found.keys() <= expected.keys()
    for name, value in found.items():
        wanted = torch.tensor(expected[name], dtype=torch.float64)
        value = torch.tensor(value, dtype=torch.float64)
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("ranks", "stages", "outer"),
    [(4, 2, FLAT), (1, 1, {"shard": "none"}), (2, 2, {"shard": "none"}), (3, 3, FLAT)],
)
def test_a_checkpoint_goes_on_in_any_layout(ranks, stages, outer, caplog):
    def body(world):
        pipe, optimizer = opened(world, stages, outer)
        extra = pipe.load(CHECKPOINT, optimizer)
        loaded = state_of(pipe, optimizer) if world.size == 1 else {}
        losses = train(pipe, optimizer, range(3, 5))
        return extra, pipe.steps_done, loaded, losses, state_of(pipe, optimizer)

    found = run_on_threads(ranks, body)
    for extra, steps_done, loaded, losses, _ in found:
        assert (extra, steps_done) == (EXTRA, 5)
        assert losses == pytest.approx(EXPECTED["losses"], rel=1e-10)
        assert loaded in ({}, EXPECTED["at_3"])  # to the bit
    after = united(each[-1] for each in found)
    assert {name.partition(":")[0] for name in after} == set(EXPECTED["at_5"]["weights"])
    assert_close(after, EXPECTED["at_5"]["all"])
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def copies_in(tmp_path):
    """Lay the copies out as four ranks of two hosts find them, for this user alone."""
    for host in ("one", "two"):
        shutil.copytree(COPIES / host, tmp_path / host / f"gpipe_hpc_{os.getuid()}" / "the_run")
    for path in tmp_path.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


def test_copies_in_memory_go_on_in_their_layout(tmp_path):
    copies_in(tmp_path)

    def body(world):
        host = ("one", "one", "two", "two")[world.rank]
        copies = open_copies(world, tmp_path / host, "the_run", {"lineage": "a", "layout": "2x2"})
        found = copies.find()
        pipe, optimizer = opened(world)
        extra = copies.restore(found, pipe, optimizer)
        weights = {name: p.tolist() for name, p in pipe.named_parameters()}
        losses = train(pipe, optimizer, range(3, 5))
        return extra, pipe.steps_done, weights, losses, state_of(pipe, optimizer)

    found = run_on_threads(4, body)
    for extra, steps_done, weights, losses, _ in found:
        assert (extra, steps_done) == (EXTRA, 5)
        assert losses == pytest.approx(EXPECTED["losses"], rel=1e-10)
        assert all(EXPECTED["at_3"][name] == value for name, value in weights.items())
    assert_close(united(each[-1] for each in found), EXPECTED["at_5"]["all"])
