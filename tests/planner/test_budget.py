"""The least recomputation that fits, against trying everything; what is kept, against autograd."""

import math
from dataclasses import replace
from itertools import chain, combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.layer_runner import RunMode
from gpipe_hpc.engine.run import Outcome, Run
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.engine.stage_runner import ForwardPlan, StageRunner
from gpipe_hpc.engine.wiring import stage_routes
from gpipe_hpc.errors import ConfigError, PartitionError
from gpipe_hpc.models import (
    LayerSpec,
    build_layer,
    build_model,
    find_skips,
    long_skips,
    run_layer,
    skip_names,
    skip_routes,
    stage_layers,
)
from gpipe_hpc.planner import LayerTimes, Request, lay_out
from gpipe_hpc.planner.budget.fitting import choose_recompute
from gpipe_hpc.planner.budget.one_stage import undominated_by_one
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.cutting.minimax import minimax
from gpipe_hpc.planner.forecast import forecast
from gpipe_hpc.planner.memory.optimizer import OptimizerMemory
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.schedule import Op, build, lower

WIDTH, SAMPLES = 8, 3


class Stash(nn.Module):
    """Passes on one thing and stashes another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), self.linear(x)


class Pop(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor, stashed: Tensor) -> Tensor:
        return x * self.linear(stashed)


class StashInput(nn.Module):
    """Stashes what it is given."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x


class Add(nn.Module):
    def forward(self, x: Tensor, stashed: Tensor) -> Tensor:
        return x + stashed


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


PLAIN = [
    LayerSpec(nn.Linear, WIDTH, WIDTH),
    LayerSpec(nn.ReLU),
    LayerSpec(nn.Identity),
    LayerSpec(nn.LayerNorm, WIDTH),
    LayerSpec(Wide, 16),
    LayerSpec(Wide, 40),
]
SKIPPING = [
    LayerSpec(Stash, 24).stashing("a"),
    LayerSpec(nn.ReLU),
    LayerSpec(StashInput).stashing("b"),
    LayerSpec(Wide, 16),
    LayerSpec(Add).popping("b"),
    LayerSpec(nn.Linear, WIDTH, WIDTH),
    LayerSpec(Pop, 24).popping("a"),
]


@st.composite
def models(draw, most=5):
    """Return a short list of layers, often with skips."""
    layers = draw(st.lists(st.sampled_from(PLAIN), min_size=2, max_size=most))
    for name, (source, destination) in {
        "a": (LayerSpec(Stash, 24), LayerSpec(Pop, 24)),
        "b": (LayerSpec(StashInput), LayerSpec(Add)),
    }.items():
        if draw(st.booleans()):
            first = draw(st.integers(0, len(layers)))
            last = draw(st.integers(first, len(layers)))
            layers.insert(last, destination.popping(name))
            layers.insert(first, source.stashing(name))
    return layers


def meta_inputs() -> Tensor:
    return torch.empty(SAMPLES, WIDTH, device="meta", requires_grad=True)


def subsets(items):
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


class Births(TorchDispatchMode):
    """Note the storage of every tensor that is made, and which of them live on.

    Not of single numbers: a loss, and the gradient that its backward starts from.
    """

    def __init__(self, parameters) -> None:
        super().__init__()
        self.own = {p.untyped_storage()._cdata for p in parameters}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.dim() and storage._cdata not in self.own:
            self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.note, result)
        return result

    def alive(self) -> int:
        return sum(nbytes for storage, nbytes in self.made.values() if not storage.expired())


def total(output, target):
    """End the last stage with a sum, which keeps nothing."""
    return output.sum(), 1.0


def parts_of(layers, first, routes):
    """Return what a stage is given by each source, in storages of its own."""
    value, stashed = torch.rand(SAMPLES, WIDTH, requires_grad=True), {}
    for index, layer in enumerate(layers[:first]):
        module = build_layer(layer, index=index, seed=0)
        value = run_layer(module, skip_names(layer), value, stashed, str(index))

    def own(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_()

    named = [tuple(own(stashed[name]) for name in names) for names in routes.sources.values()]
    return [(own(value), *named[0]) if named[0] else own(value), *named[1:]]


def kept_by_the_engine(layers, counts, index, recomputed) -> tuple[int, int]:
    """Return the bytes that live between F and R, and between R and B."""
    span = stage_layers(counts)[index]
    routes = stage_routes(find_skips(layers), counts)[index]
    stage = Stage(
        index,
        {i: build_layer(layers[i], index=i, seed=0) for i in span},
        HostDevice(),
        routes,
        names={i: skip_names(layers[i]) for i in span},
        recomputed=frozenset(recomputed),
    )
    work = StageRunner(stage)
    run = Run("test", lambda _: lambda _: 0, 7, loss_fn=total, seed=torch.tensor(1.0))
    recipe = ForwardPlan(RunMode.RECORD)
    # The first time copies inputs, to see whether layers write into them.
    work.forward(run, 0, parts_of(layers, span.start, routes), SAMPLES, recipe, Outcome())
    parts = parts_of(layers, span.start, routes)
    with Births(stage.named_parameters().values()) as births:
        for part in parts:
            tree_map_only(Tensor, births.note, part)
        work.forward(run, 1, parts, SAMPLES, recipe, Outcome())
        del part, parts
        kept = births.alive()
        work.recompute(run, 1)
        return kept, births.alive()


def assert_kept(layers, counts, index, ways):
    stage = count_stages(count_model(layers, meta_inputs()), counts)[index]
    for recomputed in ways:
        assert stage.lives(recomputed) == kept_by_the_engine(layers, counts, index, recomputed)


@pytest.mark.parametrize(
    "counts, index", [([7], 0), ([3, 4], 0), ([2, 3, 2], 1), ([3, 4], 1), ([1, 1, 3, 1, 1], 2)]
)
def test_a_stage_keeps_what_it_is_said_to(counts, index):
    assert_kept(SKIPPING, counts, index, subsets(stage_layers(counts)[index]))


@given(models(), st.data())
@settings(max_examples=25, deadline=None)
def test_any_stage_keeps_what_it_is_said_to(layers, data):
    counts, index = draw_counts(data, layers, 3), data.draw(st.integers(0, 2))
    span = stage_layers(counts)[index]
    recomputed = data.draw(st.sets(st.sampled_from(span))) if span else ()
    if span:
        assert_kept(layers, counts, index, [recomputed])


def draw_counts(data, layers, num_stages):
    ends = sorted(data.draw(st.integers(0, len(layers))) for _ in range(num_stages - 1))
    return [last - first for first, last in pairwise([0, *ends, len(layers)])]


SCHEDULES = [
    ("gpipe", 2, 2),
    ("one_f_one_b", 2, 2),
    ("zb_v", 2, 4),
    ("interleaved", 1, 2),
    ("chimera", 2, 2),
    ("zb_h1", 2, 2),
]


def everything(model, counts, name, ranks):
    """Yield each way to recompute: the total bytes of each rank, its price, and the layers."""
    stages = count_stages(model, counts)
    bare = build(name, ranks=ranks, microbatches=4, recompute="except_last")
    table = lower(with_skips(bare, model, counts))
    runs = [0] * len(stages)
    for row in bare.ranks:
        for action in row:
            runs[action.stage] += action.op is Op.R
    for recomputed in subsets(range(len(model.layers))):
        own = [frozenset(recomputed) & frozenset(stage.layers) for stage in stages]
        found = forecast(model, counts, table, 1, own)
        totals = [rank.total_bytes for rank in found.ranks]
        yield totals, sum(n * price(model, s) for n, s in zip(runs, own, strict=True)), own


def with_skips(schedule, model, counts):
    return replace(schedule, skips=long_skips(skip_routes(model.skips, counts)))


def price(model, layers) -> int:
    counts = [model.layers[i] for i in layers]
    written = [sum(sum(c.tensors) for c in (count.output, *count.stashed)) for count in counts]
    return sum(count.forward_flops for count in counts) + sum(written)


@given(models(most=3), st.sampled_from(SCHEDULES), st.data())
@settings(max_examples=20, deadline=None)
def test_the_choice_is_the_cheapest_of_all_that_fit(layers, schedule, data):
    name, ranks, num_stages = schedule
    counts = draw_counts(data, layers, num_stages)
    model = count_model(layers, meta_inputs())
    ways = list(everything(model, counts, name, ranks))
    most = [max(totals) for totals, _, _ in ways]
    limit = data.draw(st.integers(min(most) - 1, max(most)))
    assert_cheapest(model, counts, name, ranks, ways, limit)


# Running 1 to 3 again costs less than all, and lives in the same memory at the fullest time.
# Before R only 0 and 1 do better for their cost, after R only none at all: not one for both.
BETWEEN = [
    LayerSpec(StashInput).stashing("b"),
    LayerSpec(Wide, 16),
    LayerSpec(Add).popping("b"),
    LayerSpec(nn.Identity),
]


def test_a_choice_stays_that_only_two_others_together_beat():
    model, counts = count_model(BETWEEN, meta_inputs()), [4, 0]
    ways = list(everything(model, counts, "chimera", 2))
    assert_cheapest(model, counts, "chimera", 2, ways, 3744)


def assert_cheapest(model, counts, name, ranks, ways, limit):
    most = [max(totals) for totals, _, _ in ways]
    bare = with_skips(build(name, ranks=ranks, microbatches=4, recompute="never"), model, counts)
    fitting = [cost for (_, cost, _), peak in zip(ways, most, strict=True) if peak <= limit]
    if not fitting:
        with pytest.raises(PartitionError, match=r"nothing fits.* a rank by [1-9].* on "):
            choose_recompute(model, counts, bare, limit, 1)
        return
    found = choose_recompute(model, counts, bare, limit, 1)
    again = [own for _, _, own in ways if tuple(own) == found.recomputed]
    assert len(again) == 1
    runs = [0] * len(counts)
    for row in found.schedule.ranks:
        for action in row:
            runs[action.stage] += action.op is Op.R
    cost = sum(n * price(model, own) for n, own in zip(runs, found.recomputed, strict=True))
    assert cost == min(fitting)
    fits = forecast(model, counts, lower(found.schedule), 1, found.recomputed)
    assert max(rank.total_bytes for rank in fits.ranks) <= limit


@pytest.mark.parametrize("extent", [3, 8])
def test_a_triple_is_left_out_where_a_single_other_beats_it(extent):
    triples = np.random.default_rng(0).integers(0, extent, (60, 3))
    kept = [tuple(each) for each in triples[undominated_by_one(*triples.T)]]
    assert len(set(kept)) == len(kept)
    assert set(kept) == {
        tuple(one)
        for one in triples
        if not ((triples <= one).all(axis=1) & (triples < one).any(axis=1)).any()
    }


@pytest.mark.parametrize("limit", [math.nan, math.inf, 0, -1e9])
def test_a_limit_that_is_none_is_refused(limit):
    model = count_model([LayerSpec(nn.ReLU)], meta_inputs())
    table = build("gpipe", ranks=1, microbatches=2)
    with pytest.raises(ConfigError, match=f"memory_bytes .* finite number above 0, got {limit};"):
        choose_recompute(model, [1], table, limit, 0)


@pytest.mark.timeout(30)
def test_two_thousand_layers_with_skips_are_fitted_in_seconds():
    layers = build_model("unet", num_convs=48, base_channels=160)
    assert len(layers) == 2133
    model = count_model(layers, torch.empty(8, 3, 192, 192, device="meta"))
    assert model.parameters == 15_822_206_000
    counts = minimax([layer.flops for layer in model.layers], 8)
    bare = with_skips(build("one_f_one_b", ranks=8, microbatches=16), model, counts)
    never = forecast(model, counts, lower(bare), 0)
    limit = 0.6 * max(rank.total_bytes for rank in never.ranks)
    found = choose_recompute(model, counts, bare, limit, 0)
    fits = forecast(model, counts, lower(found.schedule), 0, found.recomputed)
    assert max(rank.total_bytes for rank in never.ranks) > limit
    assert max(rank.total_bytes for rank in fits.ranks) <= limit
    assert 0 < sum(map(len, found.recomputed)) < len(layers) / 2


def test_what_the_optimizer_makes_in_its_step_is_within_the_budget():
    """A budget heeded activations alone: the step of the optimizer then filled the rank."""
    model = count_model([nn.Linear(64, 64), nn.Linear(64, 64)], torch.ones(1, 64))
    bare = build("gpipe", ranks=2, microbatches=2, recompute="never")
    memory = OptimizerMemory(2, temporaries=3)
    largest = 4 * 64 * 64
    needed = 4 * (4 * 64 * 65) + 3 * largest  # weights, gradients and two states; temporaries
    assert choose_recompute(model, [1, 1], bare, needed, memory).recomputed == (frozenset(),) * 2
    with pytest.raises(
        PartitionError, match=r"temporary tensors .* 1 B on rank 0, 1 B on rank 1, wh"
    ):
        choose_recompute(model, [1, 1], bare, needed - 1, memory)
    assert choose_recompute(model, [1, 1], bare, needed - 1, memory._replace(temporaries=2))


def test_a_cut_with_room_for_the_optimizers_step_is_found_for_a_budget():
    """It was refused: the cut for little memory did not know of the step, and stayed."""
    layers = [LayerSpec(nn.Linear, 64, 64) for _ in range(4)]
    model = count_model(layers, torch.ones(1, 64))

    class Given:
        measure = "FLOPs"
        times = tuple(LayerTimes.alike(n, 2 * n, n, n) for n in (1, 1, 1, 3))
        count = model

    Given.layers = layers
    asked = Request(
        stages=2,
        microbatches=4,
        schedule="gpipe",
        partition="time",
        recompute="budget",
        memory_bytes=220_000,
        optimizer_states=OptimizerMemory(2, temporaries=3),
    )
    assert lay_out(
        replace(asked, memory_bytes=None, recompute="never"), Given()
    ).partition.counts == (3, 1)
    assert lay_out(asked, Given()).partition.counts == (2, 2)
    assert lay_out(replace(asked, recompute="except_last"), Given()).partition.counts == (2, 2)
