"""Memory that runs out in an action: who, where, the plan beside what was allocated, and help."""

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


class Full(HostDevice):
    """An accelerator, played on the host, whose memory is used up at one place."""

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
    """Finds no memory in its forward or backward for one micro-batch."""

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


def texts(where, *, plans=True, **settings):
    """Return what each of two ranks says of a step in which the second one finds no memory."""
    told = {}

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
            told[world.rank] = error
            raise

    with pytest.raises(DeviceMemoryError):
        run_on_threads(2, body, device=lambda rank: Full())
    return told


@pytest.mark.parametrize(
    ("where", "microbatch", "action"), [("forward", 2, "1F2"), ("backward", 1, "1B1")]
)
def test_who_had_no_memory_and_for_what(where, microbatch, action):
    """It was told as any other failure of an action, with torch's text and one line of advice."""
    told = texts(where)
    own = str(told[1])
    assert f"rank 1, stage 1, micro-batch {microbatch}, action {action} " in own
    assert "Tried to allocate 20.00 GiB" in own
    rows = {line.split()[0]: line for line in own.splitlines()[1:]}
    assert re.search(r"weights +2.00 GB +80 B", rows["weights"])
    assert re.search(r"sum +17.0 GB +70.0 GB", rows["sum"])
    assert re.search(r"activations +8.00 GB +of \d micro-batches", rows["activations"])
    assert "78.0 GB at peak, torch has reserved 79.0 GB of 80.0 GB" in own
    for setting in ("microbatches above 4", "recompute=always", "offload=true", "schedule=1f1b"):
        assert setting in own.splitlines()[-1]
    assert isinstance(told[0], PeerError) and own in str(told[0])
    assert isinstance(told[1].__cause__, torch.OutOfMemoryError)


def test_without_a_plan_what_is_allocated_is_shown():
    own = str(texts("forward", plans=False)[1])
    assert re.search(r"weights +- +80 B", own) and re.search(r"sum +- +70.0 GB", own)


def test_what_is_set_already_is_not_advised():
    told = texts("forward", recompute="always", schedule="1f1b", precision="bfloat16")
    last = str(told[1]).splitlines()[-1]
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


def test_what_lies_in_pieces_and_what_others_have_is_told():
    assert "EXPANDABLE" not in advice().upper() and "other processes" not in advice()
    assert "29.0 GB of torch's reserved memory are fragmented" in advice({"allocated": 50 * GB})
    assert "other processes use 11.0 GB of the device" in advice(
        {"allocated": 60 * GB, "reserved": 61 * GB, "free": 9 * GB}
    )


def test_a_device_that_tells_little_is_told_of_all_the_same():
    told = explain_exhausted(
        MemorySnapshot("the host", False, 5 * GB, 6 * GB, 5 * GB, None, None, GB, GB, 1),
        PLANNED,
        Request(),
    )
    assert "on the host, for the whole process" in told and "offload" not in told
