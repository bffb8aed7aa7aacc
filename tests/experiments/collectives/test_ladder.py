"""S-Caffe's ladder: the simulator's steps by hand, and three designs that train alike."""

import pytest
import torch

from experiments.outer.collectives.__main__ import main
from experiments.outer.collectives.costs import FORMS, Link
from experiments.outer.collectives.ladder import (
    DESIGNS,
    LadderResult,
    Layers,
    Solver,
    measured,
    resnet152,
    simulated,
)
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.schedule import Op

LAYERS = Layers([1.0, 1.0], [2.0, 2.0], [3.0, 0.5], [1.0, 4.0], 3.5, 5.0)


def test_the_simulated_steps_are_those_by_hand():
    # Everything one after the other: 3.5 + 1 + 1 + 2 + 2 + 5.
    assert simulated(LAYERS, "blocking").makespan == pytest.approx(14.5)
    # The second layer's parameters come while the first computes.
    assert simulated(LAYERS, "broadcast").makespan == pytest.approx(3 + 6 + 5)
    # The second layer's gradients are there at 3 + 4, leave until 11, the first's until 12.
    assert simulated(LAYERS, "both").makespan == pytest.approx(12)


@pytest.mark.parametrize("reduction", FORMS["reduce"])
def test_each_rung_is_faster_on_the_trace_of_resnet_152(reduction):
    layers = resnet152(reduction, Link(5e-6, 1e-10), 32, 8)
    blocking, broadcast, both = (simulated(layers, design).makespan for design in DESIGNS)
    assert blocking > broadcast > both > 0.119 + 10 * 0.0238
    assert sum(layers.backward_s) == pytest.approx(0.238)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "near"), [(2, 0.0), (3, 1e-6)])
def test_three_designs_train_to_the_same_weights_on_all_ranks(processes, tmp_path, size, near):
    """Of three ranks, Gloo sums one buffer in another order than its parts."""

    def body(rank):
        world = start_world(device="cpu", timeout_s=60)
        found = measured(world, [5, 7, 3, 4], 0.0, 4)
        solver = Solver(world, [5, 7, 3, 4], 0.0)
        steps = {design: solver.step(design, torch.ones(1, 5)) for design in DESIGNS}
        ops = {
            design: [str(event.action.op.value) for event in step.events[0]]
            for design, step in steps.items()
        }
        return found._asdict(), ops

    for read, ops in processes(size, body, tmp_path):
        found = LadderResult.of(read)
        assert found.difference <= near
        assert all(len(steps) == 4 for steps in found.step_s.values())
        counts = {
            design: [each.count(op.value) for op in (Op.F, Op.B, Op.UNSHARD, Op.REDUCE_GRAD)]
            for design, each in ops.items()
        }
        assert counts == {
            "blocking": [3, 3, 1, 1],
            "broadcast": [3, 3, 3, 1],
            "both": [3, 3, 3, 3],
        }


@pytest.mark.long
def test_the_command_prints_its_table(capsys):
    words = ["ladder", "--layers=2", "--width=16", "--compute-ms=1", "--steps=2"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "the same to the last bit" in said and "| both |" in said
