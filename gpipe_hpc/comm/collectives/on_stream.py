"""Executor of plans over accelerator tensors on a side stream, without blocking the host.

The whole plan is enqueued on a separate stream when it is started, after the work queued on the
current stream; `wait` makes the current stream wait for it. It needs a backend whose communication
is ordered by streams. Not tested on two GPUs.
"""

from collections.abc import Callable, Sequence

import torch

from gpipe_hpc.comm.collectives.agreement import Agreement
from gpipe_hpc.comm.collectives.group import CompletionCallbacks
from gpipe_hpc.comm.collectives.plan import Plan, PlanPosition
from gpipe_hpc.comm.collectives.plan_executor import Exchange, Job, Parts, TrafficKind, named
from gpipe_hpc.comm.collectives.run_plan import run_plan
from gpipe_hpc.comm.watchdog.wait_listener import ignore_wait
from gpipe_hpc.device.device import Device, Event, Stream


class StreamPlanExecutor:
    """Executor of plans over device tensors; `warm_up` creates the communicator of all ranks."""

    def __init__(
        self,
        ranks: Sequence[int],
        position: int,
        exchange: Exchange,
        warm_up: Callable[[torch.Tensor], None],
        device: Device,
    ) -> None:
        self._position, self._exchange, self._warm_up = position, exchange, warm_up
        self._agreement = Agreement(PlanPosition(len(ranks), position), ranks)
        self._device = device
        self._stream: Stream | None = None

    def start(self, plan: Plan, tensor: torch.Tensor, what: str) -> "StreamHandle":
        """Enqueue a plan behind all plans and jobs already enqueued; see `Group.start_plan`."""
        return self.start_job(
            lambda flat, swap: run_plan(plan, flat, self._position, swap), tensor, what
        )

    def start_job(self, job: Job, tensor: torch.Tensor, what: str) -> "StreamHandle":
        """Enqueue a job behind all plans and jobs already enqueued; the same on all ranks."""
        # Blocks the host, but only the first time.
        self._agreement.reach(named(what, tensor), self._greet)
        if self._stream is None:
            self._warm_up(torch.zeros(1, device=tensor.device))
            self._stream = self._device.stream()
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on(self._stream):
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            job(flat, self._enqueue)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat.view(tensor.shape))
            done = self._stream.record_event()
        self._device.keep_for_stream(tensor, self._stream)
        return StreamHandle(done, self._device)

    def _enqueue(self, sends: Parts, receives: Parts) -> None:
        # With NCCL its wait only orders the current stream, which is ours, and returns at once.
        self._exchange(TrafficKind.PLAN, sends, receives, ignore_wait)

    def _greet(self, sends: Parts, receives: Parts) -> None:
        self._exchange(TrafficKind.GREETING, sends, receives, ignore_wait)


class StreamHandle:
    """Handle of a plan or job on a side stream."""

    def __init__(self, done: Event, device: Device) -> None:
        self._done, self._device = done, device
        self._calls = CompletionCallbacks()

    def when_done(self, call: Callable[[], None]) -> None:
        """Run `call` once `wait` has made the current stream wait for the result."""
        self._calls.add(call)

    def wait(self) -> None:
        """Make the current stream wait for the result."""
        self._device.current_stream().wait_event(self._done)
        self._calls.make()
