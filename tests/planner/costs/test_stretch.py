"""What layers take one after the other, beside what each takes alone."""

import pytest
import torch
from torch import nn

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.models import LayerSpec
from gpipe_hpc.models.skips import skip_names
from gpipe_hpc.planner import measure_layers
from gpipe_hpc.planner.costs import stretch
from gpipe_hpc.planner.costs.built_layers import LayerSeconds, MeasuringOptions
from gpipe_hpc.planner.costs.clock import WorkClock
from gpipe_hpc.planner.costs.stretch import PassCorrection, StageCorrection, StretchLayer, in_stage
from gpipe_hpc.planner.costs.walk import LayerInput, LayerVisit

MS = 1e-3


class Machine(WorkClock):
    """Each piece of work takes `start_s`, and what its layers spend."""

    def __init__(self, start_s=0.0):
        self.start_s, self.time_s = start_s, 0.0

    def now(self):
        return self.time_s

    def timed(self, work, device):
        began_s = self.time_s
        self.time_s += self.start_s
        return work(), self.time_s - began_s


class _Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, machine, seconds):
        ctx.spent = machine, seconds
        machine.time_s += seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        machine, seconds = ctx.spent
        machine.time_s += 2 * seconds
        return gradient, None, None


class Working(nn.Module):
    def __init__(self, machine, seconds):
        super().__init__()
        self.machine, self.seconds = machine, seconds

    def forward(self, x):
        return _Spend.apply(x, self.machine, self.seconds)


def costs(machine, seconds):
    layers = [LayerSpec(Working, machine, each) for each in seconds]
    return measure_layers(layers, torch.ones(2, requires_grad=True), clock=machine)


def test_what_each_layer_takes_to_begin_alone_is_taken_off():
    """A stage begins once: of 8 layers, an eighth of it stays with each."""
    found = costs(Machine(start_s=0.4 * MS), [1 * MS] * 8)
    assert [each.forward_s for each in found] == pytest.approx([1.05 * MS] * 8)
    assert [each.backward_s for each in found] == pytest.approx([2.05 * MS] * 8)
    assert [each.bare_forward_s for each in found] == pytest.approx([1.05 * MS] * 8)
    # Of the halves each begins anew alone, too.
    assert [each.input_s for each in found] == pytest.approx([2.05 * MS] * 8)


def test_the_same_is_taken_off_a_large_layer_and_of_a_small_one_at_most_half():
    found = costs(Machine(start_s=1 * MS), [0.1 * MS] * 4 + [8 * MS] + [0.1 * MS] * 4)
    small, large = found[0].forward_s, found[4].forward_s
    assert small == pytest.approx(1.1 * MS / 2)
    # The large one has all else that is saved: together they take 1 ms to begin, not 9.
    assert large == pytest.approx(5.4 * MS)


def test_layers_that_take_long_are_not_run_again():
    machine = Machine(start_s=1 * MS)
    (first, *_) = costs(machine, [20 * MS] * 3)
    assert first.forward_s == pytest.approx(21 * MS)


class Slower(Machine):
    """As if other layers left nothing in the caches: later work takes longer."""

    def from_idle(self, work, device):
        result, seconds = self.timed(work, device)
        return result, self.times * seconds


@pytest.mark.parametrize(("times", "counts"), [(1.06, 1.06), (3.0, 1.1)])
def test_layers_that_take_longer_together_cost_more_but_not_what_other_work_costs(times, counts):
    machine = Slower()
    machine.times = times
    found = costs(machine, [2 * MS] * 4)
    assert [each.forward_s for each in found] == pytest.approx([2 * MS * counts] * 4)


def member(machine, index, seconds, num_bytes=0):
    layer = LayerSpec(Working, machine, seconds)
    given = LayerInput(torch.ones(2, requires_grad=True))
    own = LayerSeconds(seconds, 2 * seconds, 2 * seconds, 0.0, seconds, seconds)
    return StretchLayer(
        LayerVisit(layer, index, skip_names(layer), given),
        None,
        own,
        LayerSeconds(*[0.0] * 6),
        num_bytes,
    )


@pytest.mark.parametrize(
    ("seconds", "num_bytes", "chosen"),
    [
        ([2 * MS] * 5, [0] * 5, range(5)),
        ([30 * MS, 2 * MS, 2 * MS, 30 * MS], [0] * 4, range(1, 3)),
        ([2 * MS] * 5, [2**32, 0, 0, 0, 0], range(1, 5)),
        ([2 * MS] * 5, [0, 0, 2**32, 0, 0], range(2)),
        ([2 * MS] * 4, [2**30] * 4, range(2)),
        ([20 * MS] * 3, [0] * 3, range(0)),
        ([1e-6] * 100, [0] * 100, range(64)),
    ],
)
def test_the_longest_stretch_that_may_be_run_is_chosen(seconds, num_bytes, chosen):
    machine = Machine()
    members = [
        member(machine, index, *pair)
        for index, pair in enumerate(zip(seconds, num_bytes, strict=True))
    ]
    bench = MeasuringOptions(0, HostDevice(), 1, 0, machine)
    found = stretch._stretch(members, bench)
    assert [each.visit.index for each in found] == list(chosen)


def test_passes_end_when_they_took_long_enough(monkeypatch):
    machine = Machine()
    bench = MeasuringOptions(0, HostDevice(), 1, 0, machine)
    in_stage([member(machine, index, 5 * MS) for index in range(3)], bench)
    # 60 ms a pass; the last one begins before 1.5 s are over.
    assert machine.time_s == pytest.approx(1.5, abs=0.061)
    machine.time_s = 0.0
    in_stage([member(machine, index, 0.1 * MS) for index in range(2)], bench)
    assert machine.time_s == pytest.approx(41 * 2 * 4 * 0.1 * MS)


def test_skips_that_come_from_outside_a_stretch_are_given_to_it():
    class Stash(nn.Module):
        def forward(self, x):
            return 2 * x, x

    class Pop(nn.Module):
        def forward(self, x, stashed):
            assert stashed.shape == (3, 4)
            return x + stashed

    layers = [
        LayerSpec(Stash).stashing("a"),
        LayerSpec(nn.Linear, 4, 4),
        LayerSpec(Stash).stashing("b"),
        LayerSpec(Pop).popping("a"),
        LayerSpec(Pop).popping("b"),
    ]
    for first in (0, 1, 3):
        visits = visits_of(layers, torch.ones(3, 4, requires_grad=True))[first:]
        bench = MeasuringOptions(0, HostDevice(), 1, 0, WorkClock())
        with bench.built(visits, None) as built:
            assert all(each > 0 for each in (*built.through(), built.bare_through()))


def visits_of(layers, inputs):
    given = {"a": inputs, "b": inputs}
    names = [skip_names(layer) for layer in layers]
    return [
        LayerVisit(layer, index, own, LayerInput(inputs, tuple(given[name] for name in own.pops)))
        for index, (layer, own) in enumerate(zip(layers, names, strict=True))
    ]


def test_seconds_in_a_stage():
    own = LayerSeconds(4.0, 8.0, 5.0, 3.0, 2.0, 4.0)
    host = LayerSeconds(*[10.0] * 6)
    parts = StageCorrection(
        PassCorrection(saved_s=1.0), PassCorrection(times=1.5), PassCorrection(host=0.5)
    )
    assert parts.seconds(own, host) == (3.0, 12.0, 7.5, 4.5, 5.0, 3.0)


def test_a_stretch_takes_a_quarter_of_the_memory_that_is_free():
    class Tight(HostDevice):
        def memory_free(self):
            return 100

    machine = Machine()
    members = [member(machine, index, 1 * MS, num_bytes=10) for index in range(5)]
    bench = MeasuringOptions(0, Tight(), 1, 0, machine)
    assert len(stretch._stretch(members, bench)) == 2


def test_the_first_pass_over_a_stretch_does_not_count():
    machine = Machine()
    took = iter([9.0] * 3 + [2.0] * 1000)
    machine.timed = lambda work, device: (work(), next(took) * MS)
    bench = MeasuringOptions(0, HostDevice(), 1, 0, machine)
    members = [member(machine, index, 1 * MS) for index in range(2)]
    assert stretch._usual_passes(members, bench) == pytest.approx([2 * MS] * 3)


def test_the_loss_of_the_last_layer_is_run_with_a_stretch():
    machine = Machine()

    def loss(output, target):
        machine.time_s += 4 * MS
        return (output - target).square().sum()

    layers = [LayerSpec(Working, machine, 1 * MS) for _ in range(3)]
    example = torch.ones(2, requires_grad=True)
    *_, last = measure_layers(layers, example, torch.zeros(2), loss, clock=machine)
    assert last.forward_s == pytest.approx(5 * MS)


def test_bytes_that_a_forward_keeps_are_those_of_storages_without_parameters():
    class Kept(nn.Linear):
        def forward(self, x):
            hidden = super().forward(x).exp()  # which keeps its output
            return hidden[:, :2] * hidden[:, 2:]  # both parts of one storage

    visits = visits_of([LayerSpec(Kept, 4, 4)], torch.ones(3, 4, requires_grad=True))
    bench = MeasuringOptions(0, HostDevice(), 1, 0, WorkClock())
    with bench.built(visits, None) as built:
        # The input, for the weight's gradient, and what comes out of exp.
        assert built.kept_bytes() == 4 * (3 * 4 + 3 * 4)
