"""A failed step frees its memory; a later step succeeds or repeats the error."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.errors import ActionError, PeerError
from tests.support import square_sum

WIDTH = 4
TWO_STAGES = {"stages_per_rank": 2}


class Noted(nn.Linear):
    """Keep weak references to the tensors that autograd saves in each forward."""

    def __init__(self, made):
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.made = made

    def forward(self, x):
        inner = super().forward(x).exp()  # exp saves its output
        self.made.append(StorageWeakRef(inner.untyped_storage()))
        return inner.tanh()


class Fails(nn.Linear):
    """Raise an error in forward number `at`, counted from 1."""

    def __init__(self, at):
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.at, self.count = at, 0

    def forward(self, x):
        self.count += 1
        if self.count == self.at:
            raise ValueError("broken on purpose")
        return super().forward(x)


def _data(samples=8):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator)
    return inputs, inputs * 2


@pytest.mark.parametrize(
    ("schedule", "options"), [("looped_bfs", TWO_STAGES), ("zb_v", {}), ("gpipe", {})]
)
def test_failed_step_keeps_no_graph_alive(schedule, options):
    """Regression: after an out-of-memory error, the activations stayed until the next step."""
    made = []
    pipe = Pipeline(
        [Noted(made), Fails(at=2)],
        square_sum,
        microbatches=4,
        schedule=schedule,
        schedule_options=options,
        recompute="never",
    )
    with pytest.raises(ActionError, match="broken on purpose"):
        pipe.step(*_data())
    gc.collect()
    assert made
    assert all(each.expired() for each in made)


@pytest.mark.parametrize("recompute", ["always", "never"])
@pytest.mark.parametrize(
    ("schedule", "options"), [("looped_bfs", TWO_STAGES), ("zb_v", {}), ("one_f_one_b", {})]
)
def test_step_after_a_failed_one_is_right_in_one_process(schedule, options, recompute):
    """The next step, with fewer samples, has the gradients of a first step."""

    def gradients(at):
        torch.manual_seed(0)
        pipe = Pipeline(
            [Noted([]), Fails(at)],
            square_sum,
            microbatches=4,
            schedule=schedule,
            schedule_options=options,
            recompute=recompute,
        )
        if at:
            with pytest.raises(ActionError, match="broken on purpose"):
                pipe.step(*_data())
        pipe.step(*_data(samples=2))  # two of the micro-batches are empty
        return [parameter.grad for parameter in pipe.parameters()]

    for mine, expected in zip(gradients(at=3), gradients(at=None), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
def test_step_after_a_failed_one_repeats_its_error(schedule, at):
    """Regression: threads received messages of the failed step, and an assertion failed."""
    errors = {0: [], 1: []}

    def body(world):
        layers = [Fails(3 if at == 0 else None), Fails(3 if at == 1 else None)]
        pipe = Pipeline(
            layers,
            square_sum,
            stages=2,
            microbatches=4,
            schedule=schedule,
            partition="uniform",
            recompute="never",
            world=world,
        )
        for _ in range(2):
            try:
                pipe.step(*_data())
            except (ActionError, PeerError) as error:
                errors[world.rank].append(str(error))
        raise PeerError("the messages of the failed step are left over")

    with pytest.raises(PeerError, match="left over"):
        run_on_threads(2, body, timeout_s=20)
    texts = errors[0] + errors[1]
    assert len(texts) == 4
    assert all(text.startswith(f"rank {at}, stage {at}, micro-batch ") for text in texts)
    assert all("broken on purpose" in text for text in texts)
