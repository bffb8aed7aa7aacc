"""Simulated torch backends for one rank of a group of two ranks with equal tensors.

The backend for device tensors runs on its own stream, like NCCL's: `wait` makes the current stream
wait for it. The backend for host tensors, like Gloo, may read and write memory at any time before
`wait` returns, so the simulation does it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from gpipe_hpc.comm.collectives import torch_group
from gpipe_hpc.comm.collectives.torch_group import TorchGroup
from tests.simulated.device import SimulatedDevice
from tests.simulated.streams import SimulatedEvent

RANKS = (0, 1)


class OnStream:
    """A work of the device backend."""

    def __init__(self, device: SimulatedDevice, done: SimulatedEvent) -> None:
        self._device, self._done = device, done

    def wait(self) -> None:
        self._device.current_stream().wait_event(self._done)


class OnHost:
    """A work of the host backend."""

    def __init__(self, finish: Callable[[], object]) -> None:
        self._finish, self.is_over = finish, False

    def wait(self) -> None:
        if not self.is_over:
            self._finish()
        self.is_over = True

    def get_future(self) -> Any:
        return SimpleNamespace(add_done_callback=lambda call: None)


class Backend:
    """The backend that torch calls; it also simulates the other rank."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device, self._stream = device, device.stream()
        self.works: list[OnHost] = []
        # What comes next: as messages, and by broadcasts; these add 1 where nothing is said.
        self.mail: list[Tensor] = []
        self.told: list[Tensor] = []

    def start(self, tensor: Tensor, do: Callable[[], object]) -> OnStream | OnHost:
        if not self._device.holds(tensor):
            self.works.append(OnHost(do))
            return self.works[-1]
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on(self._stream):
            do()
        return OnStream(self._device, self._stream.record_event())

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> OnStream | OnHost | None:
        is_sum = op == dist.ReduceOp.SUM
        work = self.start(tensor, lambda: tensor.mul_(2) if is_sum else tensor.add_(0))
        if async_op:
            return work
        work.wait()
        return None

    def broadcast(
        self, tensor: Tensor, root: int, group: Any = None, async_op: bool = False
    ) -> OnStream | OnHost:
        return self.start(
            tensor, lambda: tensor.copy_(self.told.pop(0)) if self.told else tensor.add_(1)
        )

    def batch_isend_irecv(self, operations: list[Any]) -> list[OnStream | OnHost]:
        sent = [each.tensor for each in operations if each.op is dist.isend]
        got = [each.tensor for each in operations if each.op is dist.irecv]

        def do() -> None:
            for own, other in zip(got, sent, strict=True):
                # Bytes, of float32: another length gets the first number again and again.
                is_even = len(own) == len(other)
                own.copy_(other if is_even else other[:4].repeat(len(own) // 4))

        return [self.start(operations[0].tensor, do)]

    # Of torch's group.

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> OnStream | OnHost:
        self.mail.append(tensors[0])
        return self.start(tensors[0], lambda: None)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> OnStream | OnHost:
        return self.start(tensors[0], lambda: tensors[0].copy_(self.mail.pop(0)))


@contextmanager
def group_over(
    device: SimulatedDevice, *, knows_device: bool
) -> Iterator[tuple[TorchGroup, Backend]]:
    """Create a group over such a backend, or over one that supports only the device or the host."""
    backend = Backend(device)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "broadcast", "batch_isend_irecv"):
            patch.setattr(dist, name, getattr(backend, name))
        patch.setattr(dist, "P2POp", SimpleOperation)
        patch.setattr(dist, "get_rank", lambda: 0)
        patch.setattr(torch_group, "uses_device_memory", lambda group, device: knows_device)
        patch.setattr(torch_group, "accepts_device", lambda group, device: knows_device)
        torchs: Any = backend
        pulse: Any = SimpleNamespace(waits_for=None)
        own: Any = device
        yield TorchGroup(torchs, RANKS, pulse, own), backend
    assert all(work.is_over for work in backend.works), "what the host sends was let go of"


class SimpleOperation:
    """Replacement of `dist.P2POp` without its check of the group."""

    def __init__(self, op: Any, tensor: Tensor, peer: int, group: Any, tag: int) -> None:
        self.op, self.tensor = op, tensor
