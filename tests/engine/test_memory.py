"""Tensors that are alive during and after a step, counted exactly."""

import gc
import weakref

import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from tests.support import mean_square, resident_bytes

WIDTH = 4


class Saved:
    """A tensor saved by autograd; `census` counts how many are alive."""

    def __init__(self, tensor, census):
        self.tensor, self.census = tensor, census
        census.change(1)

    def __del__(self):
        self.census.change(-1)


class Census:
    """Number of objects that are alive, and its peak."""

    def __init__(self):
        self.num_alive = self.peak = 0

    def change(self, by):
        self.num_alive += by
        self.peak = max(self.peak, self.num_alive)


class InputTracker(nn.Module):
    """Layer that keeps weak references to the inputs of its stage."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inputs = []
        self.most_inputs = 0

    def num_inputs_alive(self):
        alive = [ref() for ref in self.inputs]
        return len({id(each) for each in alive if each is not None})

    def forward(self, x):
        # A forward and its recomputation use different tensors with the same storage.
        self.inputs.append(weakref.ref(x.untyped_storage() if x.requires_grad else x))
        self.most_inputs = max(self.most_inputs, self.num_inputs_alive())
        return torch.tanh(self.linear(x)).sigmoid()


def saved_tensors(stages, microbatches, schedule, recompute):
    """Return each rank's peak numbers of saved tensors and of stage inputs in one step."""

    def body(world):
        layers = [InputTracker() for _ in range(stages)]
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
        pipe.step(*batch)  # the first step copies inputs to detect in-place writes
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
def saved_per_microbatch():
    """Return for three ranks the number of tensors that autograd saves for one micro-batch."""
    return [peak for peak, _ in saved_tensors(3, 1, "gpipe", "never")]


def test_recomputation_keeps_all_inputs_and_activations_of_one_microbatch(saved_per_microbatch):
    for recompute in ("always", "except_last"):
        peaks = saved_tensors(3, 6, "gpipe", recompute)
        assert [peak for peak, _ in peaks] == saved_per_microbatch
        assert [inputs for _, inputs in peaks] == [6, 6, 6]


def test_gpipe_without_recomputation_keeps_activations_of_all_microbatches(saved_per_microbatch):
    assert [p for p, _ in saved_tensors(3, 6, "gpipe", "never")] == [
        6 * one for one in saved_per_microbatch
    ]


@pytest.mark.parametrize("microbatches", [3, 6, 12])
def test_peak_of_1f1b_does_not_grow_with_number_of_microbatches(saved_per_microbatch, microbatches):
    peaks = saved_tensors(3, microbatches, "one_f_one_b", "never")
    assert [peak for peak, _ in peaks] == [
        3 * saved_per_microbatch[0],
        2 * saved_per_microbatch[1],
        saved_per_microbatch[2],
    ]
    peaks = saved_tensors(3, microbatches, "one_f_one_b", "always")
    assert [peak for peak, _ in peaks] == saved_per_microbatch
    # The next input may have been received already, but its layer has not seen it.
    assert [inputs for _, inputs in peaks] == [3, 2, 1]


def test_batches_and_outputs_are_released_after_step_and_prediction():
    """Regression: the executor kept the last batch and all predicted outputs until its next run."""

    def body(world):
        pipe = Pipeline(
            [nn.Linear(WIDTH, WIDTH), nn.Tanh()], mean_square, microbatches=2, world=world
        )
        gc.disable()
        try:
            inputs, targets = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
            batch_refs = [weakref.ref(t.untyped_storage()) for t in (inputs, targets)]
            output_refs = []
            pipe.stages[pipe.stage_rank].layers[pipe.stage_rank].register_forward_hook(
                lambda module, args, output: output_refs.append(
                    weakref.ref(output.untyped_storage())
                )
            )
            pipe.step(inputs, targets)
            pipe.evaluate(inputs, targets)
            pipe.predict(inputs)
            del inputs, targets
            pipe.world_group.all_gather_object("all ranks are done")
            assert len(output_refs) >= 6
            return [ref() is None for ref in batch_refs + output_refs]
        finally:
            gc.enable()

    for dead in run_on_threads(2, body):
        assert all(dead)


@pytest.mark.parametrize("recompute", ["always", "except_last", "never"])
def test_memory_does_not_grow_over_steps_without_garbage_collector(recompute):
    """A leak of one boundary tensor per step would add 50 MB."""

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
