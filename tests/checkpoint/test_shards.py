"""Checkpoints of a divided optimizer: whole tensors by global name, for any layout to load."""

from functools import reduce

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.checkpoint import BackgroundSaver, read_facts
from gpipe_hpc.checkpoint.contents import collect
from gpipe_hpc.checkpoint.host_copy import HostBuffer
from gpipe_hpc.checkpoint.parts import StateCheck
from gpipe_hpc.checkpoint.rank_state import fits, pack, restore, unpack
from gpipe_hpc.data_parallel import FlatLayout, ShardSpan, layout
from gpipe_hpc.errors import CheckpointError
from gpipe_hpc.optim.optimizer import build_optimizer
from gpipe_hpc.settings import AdamWConfig
from tests.support import mean_square

WIDTH = 6
FLAT = {"shard": "flat", "bucket_bytes": 400}
WHOLE = {"shard": "none"}


def layers(dtype, tied):
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=dtype)
    ends = linear.tied({"weight": "w"}) if tied else linear
    return [ends, LayerSpec(nn.Tanh), linear, linear, ends]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def opened(world, stages, outer, tied=False, dtype=torch.float64, factory=None):
    pipe = Pipeline(
        layers(dtype, tied),
        mean_square,
        stages=stages,
        replicas=world.size // stages,
        microbatches=4 * stages // world.size,
        world=world,
        outer=outer,
    )
    if factory is not None:
        return pipe, pipe.optimizer(lambda _: factory(pipe))
    return pipe, pipe.optimizer(adamw)


def steps(pipe, optimizer, first, last, dtype=torch.float64):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(2, 8, WIDTH, generator=generator, dtype=torch.float64)
        part = pipe.share(8)
        pipe.step(inputs[part].to(dtype), targets[part].to(dtype))
        optimizer.step()


def weights(pipe):
    return {name: p.detach().clone() for name, p in pipe.named_parameters()}


def united(parts):
    found = {}
    for part in parts:
        for name, value in part.items():
            assert torch.equal(found.setdefault(name, value), value), f"replicas differ in {name}"
    return found


def saved(ranks, stages, outer, path, tied=False):
    """Train 3 steps, save, train 3 more; return the weights at the end."""

    def body(world):
        pipe, optimizer = opened(world, stages, outer, tied)
        steps(pipe, optimizer, 0, 3)
        pipe.save(path, optimizer)
        steps(pipe, optimizer, 3, 6)
        return weights(pipe)

    return united(run_on_threads(ranks, body))


def resumed(ranks, stages, outer, path, tied=False):
    def body(world):
        pipe, optimizer = opened(world, stages, outer, tied)
        pipe.load(path, optimizer)
        steps(pipe, optimizer, 3, 6)
        return weights(pipe)

    return united(run_on_threads(ranks, body))


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_goes_on_on_any_other_division(tied, tmp_path):
    """To the last bit on the same layout, to rounding on others."""
    whole = saved(4, 2, FLAT, tmp_path / "kept", tied)
    again = resumed(4, 2, FLAT, tmp_path / "kept", tied)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    for ranks, stages, outer in ((1, 1, WHOLE), (2, 1, FLAT), (4, 1, FLAT), (2, 2, WHOLE)):
        other = resumed(ranks, stages, outer, tmp_path / "kept", tied)
        assert other.keys() == whole.keys()
        assert all((whole[name] - other[name]).abs().max() < 1e-10 for name in whole)


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (2, 2)])
def test_a_whole_optimizer_goes_on_divided(ranks, stages, tmp_path):
    whole = saved(ranks, stages, WHOLE, tmp_path / "kept")
    other = resumed(4, 2, FLAT, tmp_path / "kept")
    assert all((whole[name] - other[name]).abs().max() < 1e-10 for name in whole)


def test_a_divided_optimizer_is_written_as_a_whole_one(tmp_path):
    """The same tensors of the same shapes, each once."""

    def body(world, outer, path):
        pipe, optimizer = opened(world, 1, outer)
        steps(pipe, optimizer, 0, 2)
        return pipe.save(path, optimizer)

    run_on_threads(4, lambda world: body(world, WHOLE, tmp_path / "whole"))
    run_on_threads(4, lambda world: body(world, FLAT, tmp_path / "flat"))
    told, other = (read_facts(tmp_path / name) for name in ("whole", "flat"))
    for key in ("tensors", "optimizer", "values"):
        assert told[key] == other[key]


def test_masters_are_divided_and_go_on(tmp_path):
    """Weights in bfloat16: the same masters to the last bit on the same layout."""

    def factory(pipe):
        return build_optimizer(pipe.named_parameters(), AdamWConfig(lr=1e-3))

    def body(world, outer, load=None, save=None, first=0, last=6):
        dtype = torch.bfloat16
        pipe, optimizer = opened(world, 1, outer, dtype=dtype, factory=factory)
        if load is not None:
            pipe.load(load, optimizer)
        steps(pipe, optimizer, first, last, dtype)
        if save is not None:
            pipe.save(save, optimizer)
        held = pipe.owned_parameters()
        masters = {
            (name, each.start): optimizer.state[each.parameter]["master"].reshape(-1)
            for name, each in held.items()
        }
        assert all(value.dtype == torch.float32 for value in masters.values())
        return weights(pipe), masters

    whole = run_on_threads(2, lambda world: body(world, FLAT))
    run_on_threads(2, lambda world: body(world, FLAT, save=tmp_path / "kept", last=3))
    again = run_on_threads(2, lambda world: body(world, FLAT, load=tmp_path / "kept", first=3))
    plainly = run_on_threads(2, lambda world: body(world, WHOLE))
    for (mine, masters), (theirs, others), (plain, wide) in zip(whole, again, plainly, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert all(torch.equal(mine[name], plain[name]) for name in mine)
        assert masters.keys() == others.keys()
        assert all(torch.equal(masters[key], others[key]) for key in masters)
        for (name, start), master in masters.items():
            assert torch.equal(master, wide[name, 0][start : start + len(master)])
    assert sum(len(m) for _, masters in whole for m in masters.values()) == sum(
        len(m) for m in plainly[0][1].values()
    )


def test_a_rank_needs_memory_for_what_it_writes_alone(tmp_path):
    """A parameter larger than all others lies on every replica; one puts it together."""

    def body(world):
        pipe = Pipeline(
            [LayerSpec(nn.Linear, 40, 40), LayerSpec(nn.Linear, 40, 4)],
            mean_square,
            stages=1,
            replicas=4,
            world=world,
            outer={"shard": "flat"},
        )
        optimizer = pipe.optimizer(adamw)
        pipe.step(torch.ones(2, 40), torch.ones(2, 4))
        optimizer.step()
        from gpipe_hpc.checkpoint.contents import collect

        contents = collect(pipe, optimizer, {})
        return {n: t for n, t in contents.tensors.items() if n.startswith("optimizer.")}

    parts = run_on_threads(4, body)
    names = [name for part in parts for name in part]
    assert len(names) == len(set(names))
    total = sum(t.nbytes for part in parts for t in part.values())
    largest = max(t.nbytes for part in parts for t in part.values())
    assert all(sum(t.nbytes for t in part.values()) <= total / 4 + 2 * largest for part in parts)


def test_saving_in_the_background_keeps_the_moment(tmp_path):
    def body(world):
        pipe, optimizer = opened(world, 1, FLAT)
        saver = BackgroundSaver(pipe)
        steps(pipe, optimizer, 0, 3)
        saver.start(tmp_path / "kept", optimizer)
        steps(pipe, optimizer, 3, 6)
        saver.finish()
        return weights(pipe)

    whole = united(run_on_threads(2, body))
    again = resumed(2, 1, FLAT, tmp_path / "kept")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_ranks_own_copy_goes_on():
    def body(world):
        pipe, optimizer = opened(world, 1, FLAT)
        steps(pipe, optimizer, 0, 3)
        kept = pack(pipe, optimizer, {}, HostBuffer(world.device)).clone()
        steps(pipe, optimizer, 3, 6)
        whole = weights(pipe)
        other, fresh = opened(world, 1, FLAT)
        state = unpack(kept)
        assert fits(other, state)
        restore(other, fresh, state)
        steps(other, fresh, 3, 6)
        return all(torch.equal(value, whole[name]) for name, value in weights(other).items())

    assert run_on_threads(2, body) == [True, True]


def test_saving_right_behind_a_step_waits_for_the_parameters(tmp_path):
    path = tmp_path / "kept"
    whole = saved(2, 1, FLAT, path)

    def body(world):
        pipe, optimizer = opened(world, 1, FLAT)
        pipe.load(path, optimizer)
        steps(pipe, optimizer, 3, 6)
        pipe.load(path, optimizer)
        steps(pipe, optimizer, 3, 6)
        return weights(pipe)

    again = united(run_on_threads(2, body))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_state_of_parts_that_were_divided_otherwise_does_not_fit(monkeypatch):
    """Bytes of the version before, which left no gaps in a row, were taken for one's own."""

    def kept(world):
        pipe, optimizer = opened(world, 1, FLAT)
        steps(pipe, optimizer, 0, 1)
        state = unpack(pack(pipe, optimizer, {}, HostBuffer(world.device)).clone())
        pipe.await_parameters()
        return state

    states = run_on_threads(2, kept)
    assert run_on_threads(2, lambda w: fits(opened(w, 1, FLAT)[0], states[w.rank])) == [True] * 2
    monkeypatch.setattr(layout, "ALIGNED", 1)
    assert run_on_threads(2, lambda w: fits(opened(w, 1, FLAT)[0], states[w.rank])) == [False] * 2
    for state in states:
        del state.about["parts"]  # an older version did not tell
    assert run_on_threads(2, lambda w: fits(opened(w, 1, FLAT)[0], states[w.rank])) == [False] * 2


class Choosy(torch.optim.SGD):
    """Keeps a momentum for some elements alone, as their values have it."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel() and parameter.flatten()[0] > 0:
                    self.state[parameter]["seen"] = parameter.detach().clone()


def test_states_that_some_holders_of_a_parameter_lack_are_refused(tmp_path):
    """What was saved had numbers of nobody in it; ranks may not wait for what is not sent, too."""

    def body(world):
        pipe, optimizer = opened(world, 1, FLAT, factory=lambda pipe: choosy(pipe))
        steps(pipe, optimizer, 0, 1)
        with pytest.raises(CheckpointError, match="different states of layers") as caught:
            pipe.save(tmp_path / "kept", optimizer)
        return str(caught.value)

    def choosy(pipe):
        return Choosy(dict(pipe.named_parameters()).values(), lr=0.01, momentum=0.9)

    told, *others = run_on_threads(3, body)
    assert others == [told, told]
    assert ".seen of torch.float64" in told and "outer.shard=none" in told
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (3, 24), (5, 12), (0, 30), (23, 24)])
@pytest.mark.parametrize("num_copies", [1, 3, 7, 30, 64])
def test_every_copy_knows_what_the_others_hold(start, stop, num_copies):
    """Of a parameter in a row of three, as the buckets themselves divide it."""
    sizes = {"ahead": start, "own": stop - start, "behind": 30 - stop}
    row = FlatLayout(sizes, num_copies)
    divided = [
        ShardSpan(position, *span)
        for position in range(num_copies)
        for name, *span in row.slices(position)
        if name == "own"
    ]
    assert row.spans_of("own") == divided


def test_numbers_of_holders_add_up_to_none_where_all_have_the_same():
    shares = [ShardSpan(position, position, position + 1) for position in range(3, 9)]

    def total(states):
        parts = [StateCheck.of(s, "w", shares, i) for i, s in enumerate(states, start=3)]
        return reduce(StateCheck.plus, parts).number

    assert total(["m, v"] * 6) == 0
    assert all(total(["m, v"] * i + ["m"] + ["m, v"] * (5 - i)) for i in range(6))
    assert total(["m", "m, v", "m, v", "m, v", "m, v", "m"])


def test_all_copies_write_as_much_of_what_is_divided():
    """The first of equal ones put all of it together, on its device."""

    def body(world):
        wide = [LayerSpec(nn.Linear, 16, 16, dtype=torch.float64) for _ in range(12)]
        # Each matrix is a bucket, of which all copies have as much.
        pipe = Pipeline(
            wide, mean_square, stages=1, replicas=4, microbatches=1, world=world,
            outer={"shard": "flat", "bucket_bytes": 1000},
        )  # fmt: skip
        optimizer = pipe.optimizer(adamw)
        inputs, targets = torch.ones(2, 8, 16, dtype=torch.float64)
        part = pipe.share(8)
        pipe.step(inputs[part], targets[part])
        optimizer.step()
        found = collect(pipe, optimizer, {})
        return sum(
            tensor.nbytes for name, tensor in found.tensors.items() if name.startswith("optimizer")
        )

    written = run_on_threads(4, body)
    assert sum(written) >= 12 * 2 * 16 * 16 * 8
    assert max(written) < sum(written) / 2
