"""Collectives at the end of a step: their number, exact results and content."""

from collections import Counter

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.collectives.group import CompletedHandle
from gpipe_hpc.comm.collectives.rank_summary import NUM_REPORTED
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.loss import LossTerm
from gpipe_hpc.engine.step_reduction import StepFlags, StepReduction
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import build_gpt, token_cross_entropy
from gpipe_hpc.trainer.loop import run_training
from tests.support import batch, linears, mean_square, token_batch, train_here

CPU = HostDevice()
WAITED = (
    "all_reduce",
    "all_reduce_hierarchical",
    "all_reduce_max",
    "broadcast",
    "all_gather_object",
    "gather_object",
)


class CountedGroup:
    """Wrapper of a group that counts collectives by kind and number of ranks."""

    def __init__(self, group, counter):
        self._group, self._counter = group, counter

    def __getattr__(self, name):
        found = getattr(self._group, name)
        if name not in (*WAITED, "start_all_reduce") or self._group.size == 1:
            return found

        def call(*args, **kwargs):
            self._counter["waited" if name in WAITED else "started", self._group.size] += 1
            return found(*args, **kwargs)

        return call


def count_collectives(world):
    """Count the collectives of all groups of a world; return the counter."""
    counter, form = Counter(), world.group
    world.group = lambda members: CountedGroup(form(members), counter)
    world.world_group = CountedGroup(world.world_group, counter)
    return counter


class CountsSamples(nn.Module):
    """Layer whose buffer counts samples, so that replicas differ."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        return self.inner(x)


PLAIN, NORMAL = linears(4), [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.BatchNorm1d, 4)] * 2
DRIFTING = [LayerSpec(CountsSamples, 4), *linears(3)]
TIED = build_gpt(vocab_size=11, block_size=8, num_layers=2, num_heads=2, width=8, tied=True)


def count(layers, stages, replicas, *, max_norm=None, loss=mean_square, data=None, **options):
    """Return for each rank the number of collectives in its third step, by kind and group size."""

    def body(world):
        counter = count_collectives(world)
        pipe = Pipeline(
            layers,
            loss,
            stages=stages,
            replicas=replicas,
            microbatches=2,
            partition="uniform",
            world=world,
            **options,
        )
        inputs, targets = data or batch(8)
        part = pipe.share(len(inputs))
        for _ in range(3):
            counter.clear()
            pipe.step(inputs[part], targets[part])
            if max_norm is not None:
                pipe.clip_grad_norm_(max_norm)
        return dict(counter)

    return run_on_threads(stages * replicas, body)


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (2, 1), (2, 2)])
def test_step_waits_for_one_all_reduce_and_clipping_for_another(stages, replicas, precision):
    """Regression: a step waited for five: loss, used parameters, overflows and two norms."""
    size, own = stages * replicas, {} if replicas == 1 else {("started", 2): 1}
    options = {"precision": precision}
    for each in count(PLAIN, stages, replicas, **options):
        assert each == {("waited", size): 1} | own
    expected = Counter({("waited", size): 1, **own})
    if stages > 1:
        expected["waited", stages] += 1
    for each in count(PLAIN, stages, replicas, max_norm=0.1, **options):
        assert each == expected


def test_batch_norm_and_differing_buffers_add_one_all_reduce_each():
    for each in count(NORMAL, 2, 2):
        assert each == {("waited", 4): 1, ("started", 2): 2}
    for rank, each in enumerate(count(DRIFTING, 2, 2)):
        own = {("waited", 2): 1} if rank in (0, 2) else {}
        assert each == {("waited", 4): 1, ("started", 2): 1} | own


def test_trainer_adds_no_collective_at_the_end_of_a_step(tiny, tmp_path, monkeypatch):
    """All numbers that the trainer reports at the end of a step are sent with the loss."""
    totals = []
    for steps in (3, 7):
        counters = []

        def run(config, world, stop, counters=counters):
            counters.append(count_collectives(world))
            return run_training(config, world, stop)

        monkeypatch.setattr("gpipe_hpc.trainer.loop.run_training", run)
        train_here(
            4,
            *tiny,
            "pipeline.stages=2",
            "pipeline.replicas=2",
            "train.clip_norm=1",
            f"train.steps={steps}",
            f"run.dir={tmp_path / str(steps)}",
        )
        totals.append(sum(n for c in counters for (kind, _), n in c.items() if kind == "waited"))
    assert totals[1] - totals[0] == 4 * 2 * 4  # steps, collectives per step, ranks


def test_numbers_reported_by_ranks_are_summarized():
    def body(world):
        pipe = Pipeline(linears(4), mean_square, stages=2, replicas=2, world=world)
        data = batch(8)
        part = pipe.share(8)
        result = pipe.step(data[0][part], data[1][part], lambda: [world.rank, float("inf")])
        silent = pipe.step(data[0][part], data[1][part])
        return result.rank_summary, silent.rank_summary

    ranks = run_on_threads(4, body)
    assert ranks == ranks[:1] * 4
    summary, silent = ranks[0]
    assert summary.totals[:2] == (6.0, float("inf")) and summary.first[:2] == (3, 0)
    assert (summary.least[0], summary.greatest[0]) == (0.0, 3.0)
    assert {len(part) for part in (*summary[:4], *summary.each)} == {NUM_REPORTED}
    assert [each[:2] for each in summary.each] == [(float(rank), float("inf")) for rank in range(4)]
    assert silent[:4] == ((0.0,) * NUM_REPORTED,) * 3 + ((0,) * NUM_REPORTED,)


@pytest.mark.parametrize("report", [["a"], 0.5, None])
def test_report_that_is_not_a_list_of_numbers_is_refused(report):
    """Regression: such a report raised a ValueError or TypeError that did not mention `tell`."""

    def body(world):
        pipe = Pipeline(linears(4), mean_square, stages=2, world=world)
        pipe.step(*batch(8), lambda: report if world.rank else [1.0])

    with pytest.raises(ConfigError, match=r"tell: expected a list of numbers .*as \[0\.5\]"):
        run_on_threads(2, body)


def test_report_of_too_many_numbers_is_refused():
    def body(world):
        pipe = Pipeline(linears(4), mean_square, stages=2, world=world)
        pipe.step(*batch(8), lambda: range(9 if world.rank else 1))

    with pytest.raises(ConfigError, match=r"tell: expected at most 8 numbers .*, got 9"):
        run_on_threads(2, body)


class AcceleratorGroup:
    """Group that records whether each all-reduce runs on the host or on the device."""

    def __init__(self, group):
        self._group, self.calls = group, []
        self.ranks, self.size, self.position = group.ranks, group.size, group.position
        self.width = group.width

    def all_reduce_hierarchical(self, tensor, between):
        self.all_reduce(tensor)

    def start_all_reduce(self, tensor):
        self.calls.append("device")
        self._group.all_reduce(tensor)
        return CompletedHandle()

    def all_reduce(self, tensor):
        assert tensor.device == CPU.torch
        self.calls.append("host")
        self._group.all_reduce(tensor)

    def merge_object(self, value, merge):
        return self._group.merge_object(value, merge)


class FakeAccelerator(HostDevice):
    """Host device that presents itself as an accelerator."""

    is_accelerator = True


def test_device_values_are_reduced_on_device_and_others_on_host():
    """Regression: flags were reduced separately on the host, and times in two more all-reduces."""

    def body(world):
        group = AcceleratorGroup(world.world_group)
        reduction = StepReduction(2, 3, group, world.rank, FakeAccelerator())
        own = {world.rank: LossTerm(torch.tensor(2.0 + world.rank), 4.0)}
        overflows = torch.tensor(float(world.rank), dtype=torch.float64)
        flags = {world.rank, 2}
        return reduction.reduce(own, {}, flags, overflows=overflows, reported=[7.0]), group.calls

    for known, calls in run_on_threads(2, body):
        assert calls == ["device", "host"]
        assert known.loss.terms.tolist() == [[2.0, 3.0], [4.0, 4.0]]
        assert known.flags == {0, 1, 2} and known.overflows.read() == 1.0
        assert known.reported.totals[0] == 14.0


def test_step_flags_have_separate_positions():
    flags = StepFlags(["a", "b"], [0, 3, 2])
    assert flags.size == StepFlags.NUM_COMMON + 2 + 3 + 2
    used = flags.of_use(["b", "a"], [True, False])
    united = used | flags.of_buffers(1, [False, True, True]) | flags.of_buffers(2, [True, False])
    assert len(united) == 4 and StepFlags.HAS_CHANGED not in united
    assert flags.used(["a", "b"], united) == [False, True]
    assert flags.buffers(0, united) == []
    assert flags.buffers(1, united) == [False, True, True]
    assert flags.buffers(2, united) == [True, False]


def test_local_sgd_combines_flags_within_each_replica():
    """Between replicas, only the flag for a change of the trained parameters is combined."""

    def body(world):
        replica = world.rank // 2
        pipeline = world.group([[2 * replica, 2 * replica + 1]])
        first_own = StepFlags.NUM_COMMON
        reduction = StepReduction(4, first_own + 4, world.world_group, world.rank, CPU, pipeline)
        own = {world.rank: LossTerm(1.0, 1.0)}
        first = reduction.reduce(own, {}, {first_own + world.rank}, reported=[1.0])
        changed = {StepFlags.HAS_CHANGED} if world.rank == 3 else set()
        later = reduction.reduce(own, {}, changed, reported=[1.0])
        return first.flags, later.flags, first.reported.totals[0]

    found = run_on_threads(4, body)
    own = [{n + StepFlags.NUM_COMMON for n in pair} for pair in ((0, 1), (0, 1), (2, 3), (2, 3))]
    assert [flags for flags, *_ in found] == own
    assert [rest for _, *rest in found] == [[{StepFlags.HAS_CHANGED}, 4.0]] * 4


@pytest.mark.parametrize("replicas", [2, 16])
def test_local_sgd_reduction_has_no_flags_of_single_replicas(replicas, monkeypatch):
    """Regression: each replica had its own flags in the sum: 2.5 MB per step of 1,024 replicas."""
    lengths, all_reduce_hierarchical = [], StepReduction._all_reduce_host
    slots = replicas * 4 * NUM_REPORTED

    def record_length(self, flat):
        lengths.append(len(flat))
        all_reduce_hierarchical(self, flat)

    monkeypatch.setattr(StepReduction, "_all_reduce_host", record_length)

    def body(world):
        outer = {"every": 2}
        pipe = Pipeline(
            linears(2), mean_square, stages=1, replicas=replicas, world=world, outer=outer
        )
        inputs, targets = batch(replicas)
        part = pipe.share(replicas)
        pipe.step(inputs[part], targets[part])
        return [p.grad is not None for p in pipe.parameters()]

    assert all(map(all, run_on_threads(replicas, body)))
    # Terms of micro-batches, digests, overflows, number of new rows, common flags, rank slots.
    assert set(lengths) == {2 * replicas + 4 + 1 + 1 + StepFlags.NUM_COMMON + slots}


def test_tied_parameter_adds_only_its_own_reduction():
    """Regression: its flags of use were combined in a further all-reduce of its ranks."""
    data = token_batch(vocabulary=11)
    for each in count(TIED, 2, 2, loss=token_cross_entropy, data=data):
        assert each == {("waited", 4): 1, ("started", 2): 1, ("started", 4): 1}
