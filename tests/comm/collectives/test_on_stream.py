"""Plans over tensors of a GPU, with streams that note what comes behind what, and tensors of a CPU.

No GPU takes part: what is shown is that the order is kept by streams, and that the host waits for
nothing.
"""

from contextlib import contextmanager

import pytest
import torch

from gpipe_hpc.comm.collectives.on_stream import StreamPlanExecutor
from gpipe_hpc.comm.collectives.plan import PlanPosition
from gpipe_hpc.comm.collectives.plan_executor import TrafficKind
from gpipe_hpc.comm.collectives.ring import ring_all_reduce
from gpipe_hpc.device.device import HostDevice


class Streams(HostDevice):
    """A device whose streams only note what happens on them; no wait on the host is known."""

    is_accelerator = True

    def __init__(self):
        self.log = []
        self.current = _Stream(self, "caller's")

    def stream(self):
        return _Stream(self, "own")

    def current_stream(self):
        return self.current

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def keep_for_stream(self, tensor, stream):
        self.log.append(f"memory kept for {stream.name}")


class _Stream:
    def __init__(self, streams, name):
        self.streams, self.name = streams, name

    def wait_stream(self, other):
        self.streams.log.append(f"{self.name} behind {other.name}")

    def record_event(self):
        self.streams.log.append(f"event of {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event):
        self.streams.log.append(f"{self.name} behind {event}")


@pytest.fixture
def streams():
    return Streams()


def test_a_plan_is_put_on_its_own_stream_between_what_was_and_what_comes(streams):
    """The other rank always has as much: the sum is twice the own."""
    warmed = []

    def exchange(traffic, sends, receives, note):
        streams.log.append(f"{traffic.name} on {streams.current.name}")
        for (_, out), (_, into) in zip(sends, receives, strict=True):
            into.copy_(out if len(out) == len(into) else out[:1])

    carrier = StreamPlanExecutor((0, 1), 0, exchange, warmed.append, streams)
    plan, tensor = ring_all_reduce(PlanPosition(2, 0), 6), torch.ones(6)
    pending = carrier.start(plan, tensor, "a sum")
    assert streams.log == [
        "GREETING on caller's",
        "own behind caller's",
        "PLAN on own",
        "PLAN on own",
        "event of own",
        "memory kept for own",
    ]
    pending.wait()
    assert streams.log[-1] == "caller's behind event of own"
    assert tensor.tolist() == [2.0] * 6 and len(warmed) == 1
    streams.log.clear()
    carrier.start(plan, tensor, "a sum").wait()
    # The neighbours have greeted, the communicator is there: nothing comes ahead of the plan.
    assert streams.log[:2] == ["own behind caller's", "PLAN on own"] and len(warmed) == 1
    assert TrafficKind.GREETING.name not in " ".join(streams.log)
