"""Checkpoints of local SGD store each replica, and load into any number of replicas."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.checkpoint import read_facts
from gpipe_hpc.checkpoint.host_copy import HostBuffer
from gpipe_hpc.checkpoint.rank_state import fits, pack, restore, unpack
from tests.support import batches, square_sum

WIDTH, ROWS = 4, 16
OUTERS = [
    {"every": 4, "lr": 0.7, "momentum": 0.9, "nesterov": True},
    {"every": 4, "lr": 0.7, "momentum": 0.9, "compress": "topk", "topk_fraction": 0.2},
    {"every": 4, "parts": 2, "behind": 2, "lr": 0.7, "momentum": 0.9},
]


def make(world, outer, stages=2, **options):
    layers = [
        LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64),
        LayerSpec(nn.BatchNorm1d, WIDTH, dtype=torch.float64),
        LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64),
        LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64),
    ]
    pipe = Pipeline(
        layers,
        square_sum,
        stages=stages,
        replicas=world.size // stages,
        microbatches=2,
        world=world,
        partition="uniform",
        outer={"bucket_bytes": 200, **outer},
        **options,
    )
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.05)


def train(pipe, optimizer, data):
    for inputs, targets in data:
        part = pipe.share(len(inputs))
        pipe.step(inputs[part], targets[part])
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        pipe.outer_step()
    named = dict(pipe.named_parameters())
    for stage in pipe.stages.values():
        named |= stage.named_buffers()
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def are_equal(mine, theirs):
    assert mine.keys() == theirs.keys()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("steps", [4, 5, 6])
@pytest.mark.parametrize("outer", OUTERS)
def test_resumed_run_is_bitwise_equal(outer, steps, tmp_path):
    """Saves in an outer step and between two, with optimizer states and pending averages."""
    data = batches(12, ROWS, WIDTH)

    def whole(world):
        pipe, optimizer = make(world, outer)
        train(pipe, optimizer, data[:steps])
        pipe.save(tmp_path / "kept", optimizer)
        return train(pipe, optimizer, data[steps:])

    def resumed(world):
        pipe, optimizer = make(world, outer)
        pipe.load(tmp_path / "kept", optimizer)
        return train(pipe, optimizer, data[steps:])

    for theirs, mine in zip(run_on_threads(4, whole), run_on_threads(4, resumed), strict=True):
        assert are_equal(mine, theirs)


def test_rank_resumes_from_its_copy_in_memory():
    data = batches(9, ROWS, WIDTH)

    def body(world):
        pipe, optimizer = make(world, OUTERS[0])
        train(pipe, optimizer, data[:6])
        state = unpack(pack(pipe, optimizer, {}, HostBuffer(world.device)).clone())
        whole = train(pipe, optimizer, data[6:])
        assert fits(pipe, state)
        restore(pipe, optimizer, state)
        return are_equal(train(pipe, optimizer, data[6:]), whole)

    assert run_on_threads(4, body) == [True] * 4


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 1), (3, 1), (6, 2), (1, 1), (2, 2)])
def test_other_layouts_resume_from_the_mean(outer, ranks, stages, tmp_path):
    """The same number of replicas resumes exactly; other numbers start from the mean."""
    data = batches(6, ROWS, WIDTH)

    def saved(world):
        pipe, optimizer = make(world, outer)
        return train(pipe, optimizer, data), pipe.save(tmp_path / "kept", optimizer)

    def resumed(world):
        pipe, optimizer = make(world, outer, stages)
        pipe.load(tmp_path / "kept", optimizer)
        found = train(pipe, optimizer, [])
        train(pipe, optimizer, batches(4, ROWS, WIDTH, seed=9))
        return found, train(pipe, optimizer, [])

    parts = [named for named, _ in run_on_threads(4, saved)]
    replicas = [parts[0] | parts[1], parts[2] | parts[3]]
    assert not are_equal(*replicas)
    after = run_on_threads(ranks, resumed)
    for rank, (found, later) in enumerate(after):
        for name, tensor in found.items():
            if ranks // stages == 2:
                expected = replicas[rank // stages][name]
            elif tensor.is_floating_point():
                expected = (replicas[0][name] + replicas[1][name]) / 2
            else:
                expected = replicas[0][name]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-12)
        assert all(torch.isfinite(each).all() for each in later.values())


def test_checkpoint_moves_from_synchronous_to_local_sgd_and_back(tmp_path):
    data = batches(3, ROWS, WIDTH)

    def first(world):
        pipe, optimizer = make(world, {})
        found = train(pipe, optimizer, data)
        pipe.save(tmp_path / "first", optimizer)
        return found

    def then(world):
        pipe, optimizer = make(world, OUTERS[0])
        pipe.load(tmp_path / "first", optimizer)
        found = train(pipe, optimizer, [])
        anchors = pipe.outer_state()
        assert all(torch.equal(anchors[f"anchor.{n}"], p) for n, p in pipe.named_parameters())
        train(pipe, optimizer, data)
        pipe.save(tmp_path / "then", optimizer)
        return found

    def last(world):
        pipe, optimizer = make(world, {})
        pipe.load(tmp_path / "then", optimizer)
        return train(pipe, optimizer, data)

    for before, after in zip(run_on_threads(4, first), run_on_threads(4, then), strict=True):
        assert are_equal(before, after)
    ends = run_on_threads(4, last)
    assert are_equal(ends[0], ends[2]) and are_equal(ends[1], ends[3])


def test_parameters_are_stored_once_after_an_outer_step(tmp_path):
    def body(world):
        pipe, optimizer = make(world, OUTERS[0])
        train(pipe, optimizer, batches(4, ROWS, WIDTH))
        after_outer_step = pipe.save(tmp_path / "met", optimizer)
        train(pipe, optimizer, batches(1, ROWS, WIDTH))
        return after_outer_step, pipe.save(tmp_path / "between", optimizer)

    after_outer_step, between = run_on_threads(4, body)[0]
    name = "replica1.model.layers.0.weight"
    assert name not in read_facts(after_outer_step)["tensors"]
    assert name in read_facts(between)["tensors"]
    for path in (after_outer_step, between):
        assert "replica1.optimizer.layers.0.weight.exp_avg" in read_facts(path)["tensors"]


def test_loading_only_weights_resets_the_anchors(tmp_path):
    def body(world):
        pipe, optimizer = make(world, OUTERS[0])
        train(pipe, optimizer, batches(6, ROWS, WIDTH))
        pipe.save(tmp_path / "kept", optimizer)
        pipe.load(tmp_path / "kept")
        anchors = pipe.outer_state()
        return all(torch.equal(anchors[f"anchor.{n}"], p) for n, p in pipe.named_parameters())

    assert run_on_threads(4, body) == [True] * 4
