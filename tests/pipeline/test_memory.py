"""Out-of-memory errors: rank and action, planned against allocated memory, and advice."""

import re

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.device.memory_snapshot import MemorySnapshot
from gpipe_hpc.errors import DeviceMemoryError, PeerError
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.planner.memory.exhausted import explain_exhausted
from gpipe_hpc.planner.request import Request
from tests.support import mean_square

GB = 10**9
PLANNED = RankForecast((1,), 100, 2 * GB, 0, 2 * GB, 4 * GB, GB, 0, 8 * GB, 0)


class FullDevice(HostDevice):
    """A fake accelerator on the host whose memory is used up."""

    is_accelerator, name = True, "Played 80GB"

    def memory_allocated(self):
        return 70 * GB

    def memory_peak(self):
        return 78 * GB

    def memory_reserved(self):
        return 79 * GB

    def memory_total(self):
        return 80 * GB

    def memory_free(self):
        return GB

    def out_of_memory(self, error):
        return isinstance(error, torch.OutOfMemoryError)


class Greedy(nn.Module):
    """A layer that runs out of memory in the forward or backward of one micro-batch."""

    def __init__(self, where, number=2):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.where, self.left = where, number + 1

    def _take(self):
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    def forward(self, x):
        y = self.linear(x)
        if self.where == "forward":
            self._take()
        elif y.requires_grad:
            y.register_hook(lambda gradient: self._take())
        return y


def errors_of(where, *, plans=True, **settings):
    """Return the errors of two ranks by rank, if rank 1 runs out of memory in a step."""
    errors = {}

    def body(world):
        last = LayerSpec(Greedy, where)
        pipe = Pipeline(
            [LayerSpec(nn.Linear, 4, 4), last],
            mean_square,
            stages=2,
            world=world,
            **{"microbatches": 4, "recompute": "never", **settings},
        )
        if plans:
            pipe.expect_memory([PLANNED, PLANNED])
        try:
            pipe.step(torch.ones(8, 4), torch.ones(8, 4))
        except Exception as error:
            errors[world.rank] = error
            raise

    with pytest.raises(DeviceMemoryError):
        run_on_threads(2, body, device=lambda rank: FullDevice())
    return errors


@pytest.mark.parametrize(
    ("where", "microbatch", "action"), [("forward", 2, "1F2"), ("backward", 1, "1B1")]
)
def test_out_of_memory_error_names_action_and_compares_with_plan(where, microbatch, action):
    """Regression: it was reported like any failed action, with torch's text and one hint."""
    errors = errors_of(where)
    own = str(errors[1])
    assert f"rank 1, stage 1, micro-batch {microbatch}, action {action} " in own
    assert "Tried to allocate 20.00 GiB" in own
    rows = {line.split()[0]: line for line in own.splitlines()[1:]}
    assert re.search(r"weights +2.00 GB +80 B", rows["weights"])
    assert re.search(r"sum +17.0 GB +70.0 GB", rows["sum"])
    assert re.search(r"activations +8.00 GB +of \d micro-batches", rows["activations"])
    assert "78.0 GB at peak, torch has reserved 79.0 GB of 80.0 GB" in own
    for setting in ("microbatches above 4", "recompute=always", "offload=true", "schedule=1f1b"):
        assert setting in own.splitlines()[-1]
    assert isinstance(errors[0], PeerError) and own in str(errors[0])
    assert isinstance(errors[1].__cause__, torch.OutOfMemoryError)


def test_out_of_memory_error_without_plan_shows_allocated_memory():
    own = str(errors_of("forward", plans=False)[1])
    assert re.search(r"weights +- +80 B", own) and re.search(r"sum +- +70.0 GB", own)


def test_advice_omits_settings_that_are_already_used():
    errors = errors_of("forward", recompute="always", schedule="1f1b", precision="bfloat16")
    last = str(errors[1]).splitlines()[-1]
    for setting in ("recompute", "schedule", "precision"):
        assert setting not in last


def advice(snapshot=None, **settings):
    given = {
        "device": "cuda:0 (H100)",
        "is_accelerator": True,
        "allocated": 70 * GB,
        "peak": 78 * GB,
        "reserved": 79 * GB,
        "total": 80 * GB,
        "free": 9 * GB,
        "weights": GB,
        "gradients": GB,
        "num_kept": 3,
    }
    found = MemorySnapshot(**{**given, **(snapshot or {})})
    return explain_exhausted(found, None, Request(**settings)).splitlines()[-1]


def test_advice_reports_fragmentation_and_other_processes():
    assert "EXPANDABLE" not in advice().upper() and "other processes" not in advice()
    assert "29.0 GB of torch's reserved memory are fragmented" in advice({"allocated": 50 * GB})
    assert "other processes use 11.0 GB of the device" in advice(
        {"allocated": 60 * GB, "reserved": 61 * GB, "free": 9 * GB}
    )


def test_out_of_memory_error_works_without_device_statistics():
    message = explain_exhausted(
        MemorySnapshot("the host", False, 5 * GB, 6 * GB, 5 * GB, None, None, GB, GB, 1),
        PLANNED,
        Request(),
    )
    assert "on the host, for the whole process" in message and "offload" not in message
