"""The least recomputation that fits, against trying everything; what is kept, against autograd."""

from dataclasses import replace
from itertools import chain, combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import LayerSpec, build_layer, run_layer, skip_names
from gpipe_hpc.planning.budget import choose_recompute
from gpipe_hpc.planning.counted import count_model
from gpipe_hpc.planning.forecast import forecast
from gpipe_hpc.planning.stages import count_stages, long_skips
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


class Keep(nn.Module):
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
    LayerSpec(Keep).stashing("b"),
    LayerSpec(Wide, 16),
    LayerSpec(Add).popping("b"),
    LayerSpec(nn.Linear, WIDTH, WIDTH),
    LayerSpec(Pop, 24).popping("a"),
]


@st.composite
def models(draw):
    """Return a short list of layers, often with skips."""
    layers = draw(st.lists(st.sampled_from(PLAIN), min_size=2, max_size=5))
    for name, (source, destination) in {
        "a": (LayerSpec(Stash, 24), LayerSpec(Pop, 24)),
        "b": (LayerSpec(Keep), LayerSpec(Add)),
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


class Ledger:
    """The storages that a run leaves behind, parameters left out."""

    def __init__(self, modules) -> None:
        self.own = {p.untyped_storage().data_ptr() for m in modules for p in m.parameters()}
        self.kept: dict[int, Tensor] = {}

    def note(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if (place := tensor.untyped_storage().data_ptr()) not in self.own:
                self.kept[place] = tensor

    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.kept.values())


def run_stage(modules, layers, span, recomputed, value, stashed, ledger):
    """Run a stage as its F does: segments without a graph, each noting what it starts from."""
    ledger.note(value, *(t for n in incoming(layers, span) for t in [stashed[n]]))

    def keep(tensor: Tensor) -> Tensor:
        ledger.note(tensor)
        return tensor

    own: set[str] = set()  # what the segment stashed itself
    for index in span:
        names = skip_names(layers[index])
        again = index in recomputed
        if again and (index == span.start or index - 1 not in recomputed):
            ledger.note(value)
            own = set()
        if again:
            ledger.note(*(stashed[name] for name in names.pops if name not in own))
            own |= set(names.stashes)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.set_grad_enabled(not again), hooks:
            value = run_layer(modules[index], names, value, stashed, str(index))
        if again:
            value = value.detach().requires_grad_()
            for name in names.stashes:
                stashed[name] = stashed[name].detach().requires_grad_()
    return value


def incoming(layers, span):
    stashes = {name for i in span for name in skip_names(layers[i]).stashes}
    return [n for i in span for n in skip_names(layers[i]).pops if n not in stashes]


def cut_off(stashed):
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in stashed.items()}


def kept_by_a_run(layers, span, recomputed) -> int:
    modules = [build_layer(layer, index=i, seed=0) for i, layer in enumerate(layers)]
    stashed: dict[str, Tensor] = {}
    value = torch.rand(SAMPLES, WIDTH, requires_grad=True)
    if span.start:
        value = run_stage(modules, layers, range(span.start), (), value, stashed, Ledger(modules))
    value, stashed = value.detach().clone().requires_grad_(), cut_off(stashed)
    ledger = Ledger(modules)
    output = run_stage(modules, layers, span, recomputed, value, stashed, ledger)
    assert output is not None
    return ledger.nbytes()


@pytest.mark.parametrize("span", [range(7), range(3), range(2, 5), range(3, 7), range(1, 6)])
def test_what_a_stage_keeps_is_what_a_run_keeps(span):
    model = count_model(SKIPPING, meta_inputs())
    counts = [span.start, len(span), len(SKIPPING) - span.stop]
    stage = count_stages(model, counts)[1]
    for recomputed in subsets(span):
        assert stage.kept_bytes(recomputed) == kept_by_a_run(SKIPPING, span, recomputed)


@given(models(), st.data())
@settings(max_examples=25, deadline=None)
def test_what_any_stage_keeps_is_what_a_run_keeps(layers, data):
    first = data.draw(st.integers(0, len(layers) - 1))
    span = range(first, data.draw(st.integers(first + 1, len(layers))))
    recomputed = data.draw(st.sets(st.sampled_from(span)))
    model = count_model(layers, meta_inputs())
    stage = count_stages(model, [first, len(span), len(layers) - span.stop])[1]
    assert stage.kept_bytes(recomputed) == kept_by_a_run(layers, span, recomputed)


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
    return replace(schedule, skips=long_skips(model, counts))


def price(model, layers) -> int:
    counts = [model.layers[i] for i in layers]
    written = [sum(sum(c.tensors) for c in (count.output, *count.stashed)) for count in counts]
    return sum(count.forward_flops for count in counts) + sum(written)


@given(models(), st.sampled_from(SCHEDULES), st.data())
@settings(max_examples=25, deadline=None)
def test_the_choice_is_the_cheapest_of_all_that_fit(layers, schedule, data):
    name, ranks, num_stages = schedule
    ends = sorted(data.draw(st.integers(0, len(layers))) for _ in range(num_stages - 1))
    edges = [0, *ends, len(layers)]
    counts = [b - a for a, b in pairwise(edges)]
    model = count_model(layers, meta_inputs())
    ways = list(everything(model, counts, name, ranks))
    most = [max(totals) for totals, _, _ in ways]
    limit = data.draw(st.integers(min(most) - 1, max(most)))
    bare = with_skips(build(name, ranks=ranks, microbatches=4, recompute="never"), model, counts)
    fitting = [cost for (_, cost, _), peak in zip(ways, most, strict=True) if peak <= limit]
    if not fitting:
        with pytest.raises(PartitionError, match="nothing fits"):
            choose_recompute(model, counts, bare, limit, 1)
        return
    found = choose_recompute(model, counts, bare, limit, 1)
    again = [own for _, _, own in ways if tuple(own) == found.recomputed]
    assert len(again) == 1
    runs = [0] * num_stages
    for row in found.schedule.ranks:
        for action in row:
            runs[action.stage] += action.op is Op.R
    cost = sum(n * price(model, own) for n, own in zip(runs, found.recomputed, strict=True))
    assert cost == min(fitting)
    fits = forecast(model, counts, lower(found.schedule), 1, found.recomputed)
    assert max(rank.total_bytes for rank in fits.ranks) <= limit
