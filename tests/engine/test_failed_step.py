"""What a step that failed leaves behind: nothing, and a pipeline that can go on or says why not."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.errors import ActionError, PeerError
from tests.support import square_sum

WIDTH = 4
TWICE = {"stages_per_rank": 2}


class Noted(nn.Linear):
    """Keep weak references to what autograd saves of each forward."""

    def __init__(self, made):
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.made = made

    def forward(self, x):
        inner = super().forward(x).exp()  # which saves its output
        self.made.append(StorageWeakRef(inner.untyped_storage()))
        return inner.tanh()


class Fails(nn.Linear):
    """Raise in the forward of one number, counted from 1."""

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
    ("schedule", "options"), [("looped_bfs", TWICE), ("zb_v", {}), ("gpipe", {})]
)
def test_a_step_that_failed_keeps_no_graph_alive(schedule, options):
    """Who ran out of memory had all activations of the failed step in it until the next one."""
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
    ("schedule", "options"), [("looped_bfs", TWICE), ("zb_v", {}), ("one_f_one_b", {})]
)
def test_one_process_goes_on_after_a_step_that_failed(schedule, options, recompute):
    """The next step, of fewer samples, has the gradients of one that nothing went ahead of."""

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

    for mine, wanted in zip(gradients(at=3), gradients(at=None), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
def test_a_step_behind_one_that_failed_repeats_why(schedule, at):
    """Threads took a message of the failed step for one of their own: a failed assertion."""
    told = {0: [], 1: []}

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
                told[world.rank].append(str(error))
        raise PeerError("the messages of the failed step are left over")

    with pytest.raises(PeerError, match="left over"):
        run_on_threads(2, body, timeout_s=20)
    texts = told[0] + told[1]
    assert len(texts) == 4
    assert all(text.startswith(f"rank {at}, stage {at}, micro-batch ") for text in texts)
    assert all("broken on purpose" in text for text in texts)
