"""What lives during a step and after it: counted, not estimated."""

import gc
import weakref

import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from tests.support import mean_square, resident_bytes

WIDTH = 4


class Saved:
    """A tensor that autograd keeps; `census` knows how many there are."""

    def __init__(self, tensor, census):
        self.tensor, self.census = tensor, census
        census.change(1)

    def __del__(self):
        self.census.change(-1)


class Census:
    """How many live now, and the most there ever were."""

    def __init__(self):
        self.num_alive = self.peak = 0

    def change(self, by):
        self.num_alive += by
        self.peak = max(self.peak, self.num_alive)


class Inside(nn.Module):
    """Remember, weakly, each input of the stage that begins here."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inputs = []
        self.most_inputs = 0

    def num_inputs_alive(self):
        alive = [ref() for ref in self.inputs]
        return len({id(each) for each in alive if each is not None})

    def forward(self, x):
        # A forward and its recomputation have tensors of their own on the memory of a boundary.
        self.inputs.append(weakref.ref(x.untyped_storage() if x.requires_grad else x))
        self.most_inputs = max(self.most_inputs, self.num_inputs_alive())
        return torch.tanh(self.linear(x)).sigmoid()


def saved_tensors(stages, microbatches, schedule, recompute):
    """Return each rank's most saved tensors within a step, and its most boundary inputs."""

    def body(world):
        layers = [Inside() for _ in range(stages)]
        pipe = Pipeline(
            layers,
            mean_square,
            microbatches=microbatches,
            schedule=schedule,
            recompute=recompute,
            world=world,
        )
        own = layers[pipe.stage_rank]
        batch = torch.randn(24, WIDTH), torch.randn(24, WIDTH)
        pipe.step(*batch)  # the first one copies, to see whether layers write in place
        own.most_inputs = 0
        census = Census()
        gc.disable()
        try:
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: Saved(tensor, census), lambda saved: saved.tensor
            )
            with hooks:
                pipe.step(*batch)
            assert census.num_alive == 0 and own.num_inputs_alive() == 0
        finally:
            gc.enable()
        return census.peak, own.most_inputs

    return run_on_threads(stages, body)


@pytest.fixture(scope="module")
def inside():
    """Return what each of three ranks keeps of one micro-batch."""
    return [peak for peak, _ in saved_tensors(3, 1, "gpipe", "never")]


def test_recomputation_keeps_all_boundaries_and_the_inside_of_one_microbatch(inside):
    for recompute in ("always", "except_last"):
        kept = saved_tensors(3, 6, "gpipe", recompute)
        assert [peak for peak, _ in kept] == inside
        assert [inputs for _, inputs in kept] == [6, 6, 6]


def test_without_recomputation_gpipe_keeps_the_inside_of_every_microbatch(inside):
    assert [p for p, _ in saved_tensors(3, 6, "gpipe", "never")] == [6 * one for one in inside]


@pytest.mark.parametrize("microbatches", [3, 6, 12])
def test_peak_of_1f1b_does_not_grow_with_the_microbatches(inside, microbatches):
    kept = saved_tensors(3, microbatches, "one_f_one_b", "never")
    assert [peak for peak, _ in kept] == [3 * inside[0], 2 * inside[1], inside[2]]
    kept = saved_tensors(3, microbatches, "one_f_one_b", "always")
    assert [peak for peak, _ in kept] == inside
    # The next boundary may have arrived already; only its layer has not seen it.
    assert [inputs for _, inputs in kept] == [3, 2, 1]


def test_nothing_of_a_step_or_a_prediction_stays():
    """The executor once kept the last batch and all predicted outputs until its next run."""

    def body(world):
        pipe = Pipeline(
            [nn.Linear(WIDTH, WIDTH), nn.Tanh()], mean_square, microbatches=2, world=world
        )
        gc.disable()
        try:
            inputs, targets = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
            given = [weakref.ref(t.untyped_storage()) for t in (inputs, targets)]
            made = []
            pipe.stages[pipe.stage_rank].layers[pipe.stage_rank].register_forward_hook(
                lambda module, args, output: made.append(weakref.ref(output.untyped_storage()))
            )
            pipe.step(inputs, targets)
            pipe.evaluate(inputs, targets)
            pipe.predict(inputs)
            del inputs, targets
            pipe.world_group.all_gather_object("all ranks are done")
            assert len(made) >= 6
            return [ref() is None for ref in given + made]
        finally:
            gc.enable()

    for dead in run_on_threads(2, body):
        assert all(dead)


@pytest.mark.parametrize("recompute", ["always", "except_last", "never"])
def test_hundreds_of_steps_without_the_garbage_collector_do_not_grow(recompute):
    """A boundary that leaked once a step would make 50 MB."""

    def body(world):
        layers = [nn.Linear(256, 16), nn.Linear(16, 1)]
        pipe = Pipeline(layers, mean_square, microbatches=2, recompute=recompute, world=world)
        batch = torch.randn(256, 256), torch.randn(256, 1)
        measured = []
        for step in range(251):
            pipe.step(*batch)
            if step in (50, 250):
                pipe.world_group.all_gather_object("between steps")
                measured.append((len(gc.get_objects()), resident_bytes()))
                pipe.world_group.all_gather_object("measured")
        return measured

    gc.collect()
    gc.disable()
    try:
        (objects, resident), (more_objects, more_resident) = run_on_threads(2, body)[0]
    finally:
        gc.enable()
    assert more_objects - objects < 100
    assert more_resident - resident < 16e6
