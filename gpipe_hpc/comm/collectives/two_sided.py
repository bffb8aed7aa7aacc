"""A group with two backends: one for device tensors and a sparse one for host tensors.

torch would create both as full meshes, connecting every rank with every other over Gloo for little
host traffic. Here Gloo connects each rank with few others.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gpipe_hpc.comm.collectives.bruck import all_reduce, all_to_all, reduce_scatter
from gpipe_hpc.comm.collectives.group import (
    CollectiveHandle,
    CompletedHandle,
    Group,
    PeerTensor,
    TrafficCounter,
)
from gpipe_hpc.comm.collectives.orders import in_rank_order
from gpipe_hpc.comm.collectives.plan import Plan, PlanPosition
from gpipe_hpc.comm.collectives.run_plan import Exchange as Swap
from gpipe_hpc.comm.collectives.run_plan import plus
from gpipe_hpc.comm.collectives.shards import checked_counts
from gpipe_hpc.comm.collectives.torch_group import TorchGroup
from gpipe_hpc.device.device import Device

T = TypeVar("T")


class TwoSidedGroup:
    """A `Group` that sends device tensors over `own` and all host tensors and objects over `host`.

    Sums in rank order and `all_to_all` are forwarded through other ranks in both parts; otherwise
    each rank would need a connection to every other.
    """

    def __init__(self, own: TorchGroup, host: Group, device: Device) -> None:
        assert own.ranks == host.ranks, f"expected one group, got {own.ranks} and {host.ranks}"
        self._own, self._host, self._device = own, host, device
        self._place = PlanPosition(own.size, own.position)
        self.ranks = own.ranks
        self.size = self.width = own.size
        self.position = own.position

    @property
    def sent(self) -> TrafficCounter:
        """Return the traffic of both parts."""
        return self._own.sent.plus(self._host.sent)

    @property
    def torch_group(self) -> dist.ProcessGroup | None:
        """Return the torch process group for device tensors."""
        return self._own.torch_group

    def _side(self, tensor: torch.Tensor) -> Group:
        return self._own if self._device.holds(tensor) else self._host

    def start_all_reduce(self, tensor: torch.Tensor) -> CollectiveHandle:
        """Start summing `tensor` in place."""
        return self._side(tensor).start_all_reduce(tensor)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` in place."""
        self._side(tensor).all_reduce(tensor)

    def all_reduce_hierarchical(self, tensor: torch.Tensor, between: Callable[[int], None]) -> None:
        """All-reduce `tensor` in place; there is only one level."""
        self.all_reduce(tensor)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Replace each element by its maximum over all ranks."""
        self._side(tensor).all_reduce_max(tensor)

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveHandle:
        """Start overwriting `tensor` with that of world rank `root`."""
        return self._side(tensor).start_broadcast(tensor, root)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` with that of world rank `root`."""
        self._side(tensor).broadcast(tensor, root)

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]
    ) -> CollectiveHandle:
        """Start an exchange of tensors that are all on the host or all on the device."""
        if not sends and not receives:
            return CompletedHandle()
        return self._side((*sends, *receives)[0].tensor).start_exchange(sends, receives)

    def start_plan(self, plan: Plan, tensor: torch.Tensor, what: str) -> CollectiveHandle:
        """Start executing this rank's plan in place on `tensor`."""
        return self._side(tensor).start_plan(plan, tensor, what)

    def start_reduce_scatter(
        self, whole: torch.Tensor, counts: Sequence[int] | None = None
    ) -> CollectiveHandle:
        """Start an in-place reduce-scatter."""
        return self._side(whole).start_reduce_scatter(whole, counts)

    def start_all_gather(
        self, whole: torch.Tensor, counts: Sequence[int] | None = None
    ) -> CollectiveHandle:
        """Start filling `whole` with the shards of all ranks."""
        return self._side(whole).start_all_gather(whole, counts)

    def start_ordered_all_reduce(self, tensor: torch.Tensor) -> CollectiveHandle:
        """Start summing `tensor` in place, each element in rank order."""
        if not self._own.uses_own(tensor):
            return self._host.start_ordered_all_reduce(tensor)
        parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        order = in_rank_order(parts.numel(), parts.element_size(), self.size)

        def job(flat: torch.Tensor, swap: Swap) -> None:
            all_reduce(self._place, flat, order, swap, plus)

        return self._own.start_job(job, parts, "all-reduce in the order of ranks")

    def start_ordered_reduce_scatter(self, whole: torch.Tensor) -> CollectiveHandle:
        """Start a reduce-scatter with equal shards that adds each element in rank order."""
        if not self._own.uses_own(whole):
            return self._host.start_ordered_reduce_scatter(whole)
        order = in_rank_order(len(whole), whole.element_size(), self.size)

        def job(flat: torch.Tensor, swap: Swap) -> None:
            reduce_scatter(self._place, flat, order, swap, plus)

        return self._own.start_job(job, whole, "reduce-scatter in the order of ranks")

    def all_to_all(self, whole: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return this rank's shard of every rank's vector."""
        if not self._own.uses_own(whole):
            return self._host.all_to_all(whole, counts)
        sizes, came = checked_counts(whole, counts, self.size), list[torch.Tensor]()

        def job(flat: torch.Tensor, swap: Swap) -> None:
            came.extend(all_to_all(self._place, flat, sizes, swap))

        self._own.start_job(job, whole, f"all-to-all, shards {sizes}").wait()
        for shard in came:  # allocated on the job's stream
            self._device.keep_for_stream(shard, self._device.current_stream())
        return came

    def all_gather(self, whole: torch.Tensor, counts: Sequence[int]) -> None:
        """Fill `whole` with all shards; on the device, along a ring if their sizes differ."""
        if self._device.holds(whole):
            self._own.start_all_gather(whole, counts).wait()
        else:
            self._host.all_gather(whole, counts)

    def merge_object(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Reduce the objects of all ranks with `merge`."""
        return self._host.merge_object(value, merge)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        return self._host.all_gather_object(value)

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """Return the values of all ranks on world rank `root`, None elsewhere."""
        return self._host.gather_object(value, root)

    def scatter_object(self, values: Sequence[Any] | None, root: int) -> Any:
        """Return this rank's entry of the root's `values`."""
        return self._host.scatter_object(values, root)

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Return the value of world rank `root`."""
        return self._host.broadcast_object(value, root)
