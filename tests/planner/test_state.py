"""Copies of buffers that forwards change: counted, and as many as a step really holds."""

import weakref

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import PartitionError
from gpipe_hpc.planner.budget.fitting import choose_recompute
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.forecast import forecast
from gpipe_hpc.schedule import build, lower

WIDTH, SIZE, MICROBATCHES = 4, 50_000, 4
NUM_BYTES = 4 * SIZE


class Plain(nn.Linear):
    """Have a buffer that stays as it is."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(SIZE))

    def forward(self, x):
        return super().forward(x - self.average[:WIDTH])


class InPlace(Plain):
    def forward(self, x):
        self.average.mul_(0.9)
        return super().forward(x)


class Replaced(Plain):
    def forward(self, x):
        self.average = self.average * 0.9
        return super().forward(x)


def counted(kind, precision="float32"):
    example = torch.empty(2, WIDTH, device="meta")
    return count_model([LayerSpec(kind)], example, precision=precision)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_only_buffers_that_move_are_counted(precision):
    assert counted(Plain, precision).layers[0].state_bytes == 0
    for kind in (InPlace, Replaced):
        assert counted(kind, precision).layers[0].state_bytes == NUM_BYTES


def test_batchnorm_has_no_copies():
    example = torch.empty(8, WIDTH, device="meta")
    (count,) = count_model([LayerSpec(nn.BatchNorm1d, WIDTH)], example).layers
    assert count.state_bytes == 0


@pytest.mark.parametrize("recompute", ["always", "never"])
@pytest.mark.parametrize("kind", [InPlace, Replaced])
def test_a_forecast_has_a_copy_for_each_microbatch_under_way(recompute, kind):
    def activation_bytes(kind):
        table = lower(build("gpipe", ranks=1, microbatches=MICROBATCHES, recompute=recompute))
        return forecast(counted(kind), [1], table, 2).ranks[0].activation_bytes

    assert activation_bytes(kind) - activation_bytes(Plain) == MICROBATCHES * NUM_BYTES


def test_a_step_holds_as_many_as_are_forecast():
    """Besides the lasting one, which is with the weights."""
    alive, most = [], []

    class Watched(InPlace):
        def forward(self, x):
            out = super().forward(x)
            alive.append(weakref.ref(self.average.untyped_storage()))
            living = {s.data_ptr() for ref in alive if (s := ref()) is not None}
            most.append(len(living))
            return out

    def body(world):
        pipe = Pipeline(
            [Watched()],
            nn.functional.mse_loss,
            microbatches=MICROBATCHES,
            recompute="always",
            world=world,
        )
        for _ in range(2):
            most.clear()
            pipe.step(torch.ones(8, WIDTH), torch.ones(8, WIDTH))
        return max(most)

    # The lasting one, and the copies; one more for the while of a recomputation.
    assert MICROBATCHES < run_on_threads(1, body)[0] <= MICROBATCHES + 2


def test_a_budget_has_room_for_them():
    """A limit that fits without the copies, and not with them, was met on paper alone."""
    bare = build("gpipe", ranks=1, microbatches=MICROBATCHES)
    choose_recompute(counted(Plain), [1], bare, 3 * NUM_BYTES, 0)
    choose_recompute(counted(InPlace), [1], bare, 4 * NUM_BYTES + 3000, 0)
    with pytest.raises(PartitionError, match="nothing fits"):
        choose_recompute(counted(InPlace), [1], bare, 3 * NUM_BYTES, 0)
