"""Buckets: gradients of parameters of one dtype that are all-reduced together.

`choose_strategy` selects how a bucket is summed over replicas.

    Bucket            every replica gets the whole sum (DDP)
    ShardedBucket     every replica gets its shard of the sum and owns that shard (ZeRO)
    LocalGradients    no other replica: no communication, no memory before the first backward

All three have the same methods, called in this order in a step: `clear`, `start_reduction`, `wait`,
`finish`.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor, nn

from gpipe_hpc.comm.collectives.group import CollectiveHandle, Group
from gpipe_hpc.comm.collectives.packed import PACK, packs
from gpipe_hpc.comm.collectives.planned import start_hierarchical_all_reduce
from gpipe_hpc.data_parallel.layout import BucketItem, FlatLayout, OwnedParameter
from gpipe_hpc.device.device import Device
from gpipe_hpc.device.host.machine import shared_identity
from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.settings import Outer
from gpipe_hpc.torch_compat import storage_use_count

_LOW: Final = (torch.bfloat16, torch.float16)
_SMALL: Final = 2**18  # elements: a kernel for a larger tensor runs longer than its launch takes
# Use count of a storage that only one tensor has: the tensor, and the query itself.
_UNSHARED: Final = 2


ReduceStrategy = Callable[[Tensor, Sequence[BucketItem]], CollectiveHandle]
"""Starts summing a flat tensor over replicas in place, and returns a handle to wait for.

The second argument describes the contents of the tensor. All replicas start the same sums in the
same order.
"""

_HOST_ID_BYTES: Final = 8


def choose_strategy(outer: Outer, group: Group, *, is_tied: bool = False) -> ReduceStrategy | None:
    """Return how a bucket is summed with these settings; None if the group has no other rank.

    - ``outer.shard=flat``: a reduce-scatter. Each replica gets its shard of the sum; the rest of
      the buffer is undefined afterwards.
    - ``outer.hierarchy``: within hosts first, then between hosts.
    - ``outer.order=rank``: each element is summed in the order of ranks.
    - otherwise the backend's all-reduce, in an order of its choice with equal bits on all replicas.

    Args:
        outer: The settings.
        group: The ranks with the same parameters; all of them must call this.
        is_tied: Whether the group shares a tied parameter. Its ranks are of several stages, so only
            outer.order applies.

    Raises ConfigError for a hierarchy that does not divide the number of replicas.
    """
    if group.size == 1:
        return None
    is_ordered = outer.order == "rank"
    if outer.shard == "flat" and not is_tied:
        return _collective(
            group.start_ordered_reduce_scatter if is_ordered else group.start_reduce_scatter
        )
    if outer.hierarchy != "none" and not is_tied:
        outer.check_copies(group.size)
        hosts = _hosts(group, outer.hierarchy)
        return _collective(lambda flat: start_hierarchical_all_reduce(group, flat, hosts))
    return _collective(group.start_ordered_all_reduce if is_ordered else group.start_all_reduce)


def _collective(start: Callable[[Tensor], CollectiveHandle]) -> ReduceStrategy:
    """Return a strategy that sums the whole buffer, whatever it contains."""
    return lambda flat, items: start(flat)


def _hosts(group: Group, hierarchy: str | int) -> list[Hashable]:
    """Return the host of each replica; all replicas must call this.

    Args:
        group: The replicas.
        hierarchy: ``host``, or the number of consecutive replicas that count as one host.
    """
    if isinstance(hierarchy, int):
        return [position // hierarchy for position in range(group.size)]
    # A rank that shares its network interface with no other counts as a host of its own.
    own = shared_identity("net") or f"position {group.position}"
    host = blake2b(own.encode(), digest_size=_HOST_ID_BYTES).hexdigest()
    runs = group.merge_object([(host, 1)], join_runs)
    return [host for host, count in runs for _ in range(count)]


_Runs = list[tuple[str, int]]
"""Hosts, each with the number of consecutive replicas on it: short for any number of replicas."""


def join_runs(first: _Runs, second: _Runs) -> _Runs:
    """Join the host runs of some replicas with those of the following replicas."""
    (host, count), (next_host, next_count) = first[-1], second[0]
    if host != next_host:
        return [*first, *second]
    return [*first[:-1], (host, count + next_count), *second[1:]]


class Divisor:
    """Divides gradients of any dtype by one number, with the same bits on every device.

    Gradients are divided in their own precision, 16-bit ones in float32. On an accelerator the
    latter are converted, because it would round the divisor to 16 bits, too.

    Args:
        value: The number, float64[], on a device.
        device: Device of the gradients.
    """

    def __init__(self, value: Tensor, device: Device) -> None:
        self.value = value
        self._device = device
        self._known: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def divide(self, tensors: Sequence[Tensor]) -> None:
        """Divide tensors in place."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for (dtype, device), kind in kinds.items():
            is_low = dtype in _LOW
            number = self._number(torch.float32 if is_low else dtype, device)
            if is_low and self._device.is_accelerator:
                _divide_wide(kind, number)
            else:
                torch._foreach_div_(kind, number)

    def _number(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Of the tensors' own dtype, or torch divides them one by one.
        known = self._known.get((dtype, device))
        if known is None:
            is_there = device == self.value.device
            number = self.value if is_there else self._device.to_host(self.value)
            known = self._known[dtype, device] = number.to(dtype)
        return known


def _divide_wide(tensors: Sequence[Tensor], divisor: Tensor) -> None:
    small = [tensor for tensor in tensors if tensor.numel() <= _SMALL]
    for pack in packs(small, PACK):
        wide = [torch.empty_like(tensor, dtype=torch.float32) for tensor in pack]
        torch._foreach_copy_(wide, pack)
        torch._foreach_div_(wide, divisor)
        torch._foreach_copy_(pack, wide)
    for tensor in tensors:
        if tensor.numel() > _SMALL:
            tensor.div_(divisor.view(1))  # of one dimension, so that torch computes in float32


def by_kind(named: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Return the parameters grouped by dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, parameter in named.items():
        kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
    return list(kinds.values())


class Bucket:
    """Gradients of parameters of one dtype in one flat buffer, all-reduced over replicas.

    Autograd accumulates into views of the buffer in place. Each view has its own version counter,
    which shows without a hook whether a micro-batch used the parameter.

    Args:
        named: The parameters by global name, in the order of their memory.
        memory: The flat buffer and the part of each parameter; None allocates it.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        memory: tuple[Tensor, Sequence[Tensor]] | None = None,
    ) -> None:
        self._names, self.parameters = list(named), list(named.values())
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._flat, self._parts = memory or _allocate(named)
        self._views: list[Tensor] = []
        self._versions: list[int] = []
        self._collected: list[int] = []
        self._used: list[bool] = []
        self._pending: CollectiveHandle | None = None

    def clear(self) -> None:
        """Set all gradients to zero and assign their views to `.grad`.

        Raises ModelError for a parameter whose dtype, shape or device has changed.
        """
        self._flat.zero_()
        # `.data` gives each view a version counter of its own; plain views would share one.
        self._views = [
            part.data.view(shape) for part, shape in zip(self._parts, self._shapes, strict=True)
        ]
        self._versions = [view._version for view in self._views]
        self._pending = None
        rows = zip(self._names, self.parameters, self._views, strict=True)
        for name, parameter, view in rows:
            try:
                parameter.grad = view
            except RuntimeError as error:
                raise _changed_kind(name, parameter, view) from error

    def unshare(self) -> None:
        """Do nothing: the gradients are in the bucket's own buffer."""

    def used(self) -> list[bool]:
        """Return for each parameter whether this replica had used it when the reduction started."""
        return self._used

    def start_reduction(self, strategy: ReduceStrategy | None) -> CollectiveHandle | None:
        """Start summing the buffer over replicas; return None if there is no other replica.

        All gradients must be complete.
        """
        self.collect()
        self._pending = None if strategy is None else strategy(self._flat, self._items())
        return self._pending

    def collect(self) -> None:
        """Record which parameters were used, and copy gradients that user hooks replaced."""
        triples = zip(self.parameters, self._views, self._versions, strict=True)
        self._used = [
            p.grad is not None and (p.grad is not view or view._version != old)
            for p, view, old in triples
        ]
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()  # a user's hook removed the gradient
            elif parameter.grad is not view:
                view.copy_(parameter.grad)  # a user's hook replaced the gradient
            parameter.grad = view
        self._collected = [view._version for view in self._views]

    def late(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients changed after the reduction had started.

        Such a change may be missing from the sum.
        """
        rows = zip(self.parameters, self._views, self._collected, strict=True)
        return [p for p, view, old in rows if p.grad is not view or view._version != old]

    def _items(self) -> tuple[BucketItem, ...]:
        begin = int(self._flat.storage_offset())
        starts = [int(part.storage_offset()) - begin for part in self._parts]
        rows = zip(self._names, self.parameters, starts, self._used, strict=True)
        return tuple(BucketItem(n, p.shape, at, at + p.numel(), used) for n, p, at, used in rows)

    def wait(self) -> None:
        """Wait for the sum; on an accelerator, until the current stream may use it."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def finish(self, divisor: Divisor, used: Sequence[bool]) -> None:
        """Wait for the sum and divide it; set `.grad` to None if no replica used a parameter."""
        self.wait()
        divisor.divide([self._flat])
        for parameter, view, is_used in zip(self.parameters, self._views, used, strict=True):
            parameter.grad = view if is_used else None


def _allocate(named: Mapping[str, nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    """Return a buffer of zeros for the gradients of these parameters, and the part of each."""
    kinds = {(p.dtype, p.device) for p in named.values()}
    assert len(kinds) == 1, f"a bucket is of one dtype and device, got {kinds}"
    dtype, device = kinds.pop()
    layout = FlatLayout({name: p.numel() for name, p in named.items()})
    flat = torch.zeros(layout.num_elements, dtype=dtype, device=device)
    return flat, [flat[at : at + layout.sizes[name]] for name, at in layout.offsets.items()]


def _changed_kind(name: str, parameter: nn.Parameter, view: Tensor) -> ModelError:
    before, now = _kind(view), _kind(parameter)
    return ModelError(
        f"{name}: expected {before}, as when the pipeline was created, got {now}; change the "
        f"layers before Pipeline is created, or copy into the parameter with p.data.copy_(...)"
    )


def _kind(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} on {tensor.device}"


class ShardedBucket(Bucket):
    """Parameters of one dtype and their gradients in two flat buffers, sharded over replicas.

    A reduce-scatter gives each replica its shard of the summed gradients. The optimizer updates the
    replica's parameters in `owned`; an all-gather then sends them to the other replicas. The
    parameters become views of the parameter buffer.

    Args:
        named: The parameters by global name, in the order of their memory.
        group: The replicas.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], group: Group) -> None:
        self._named, self._group = dict(named), group
        layout = FlatLayout({name: p.numel() for name, p in named.items()}, group.size)
        self._shard = slice(*layout.span(group.position))
        first = next(iter(named.values()))
        self._values = torch.zeros(layout.padded_elements, dtype=first.dtype, device=first.device)
        self._gradients = torch.zeros_like(self._values)
        self._places = {n: slice(at, at + layout.sizes[n]) for n, at in layout.offsets.items()}
        with torch.no_grad():
            for name, parameter in named.items():
                view = self._values[self._places[name]].view_as(parameter)
                view.copy_(parameter)
                parameter.data = view
        self.owned: dict[str, OwnedParameter] = {}
        self._owned_places: dict[str, slice] = {}
        for name, start, stop in layout.slices(group.position):
            at = slice(layout.offsets[name] + start, layout.offsets[name] + stop)
            self._owned_places[name] = at
            part = nn.Parameter(self._values[at])
            self.owned[name] = OwnedParameter(part, named[name], start, layout, name)
        self._have_gradients: set[str] = set()
        self._gathering: CollectiveHandle | None = None
        self._reset([])

    def _reset(self, trained: Sequence[str]) -> None:
        """Use the buffers for these trained parameters."""
        parts = [self._gradients[self._places[name]] for name in trained]
        super().__init__({name: self._named[name] for name in trained}, (self._gradients, parts))

    @property
    def whole(self) -> list[nn.Parameter]:
        """Return the whole parameters of the bucket."""
        return list(self._named.values())

    def check_memory(self) -> None:
        """Raise ConfigError if the data of a parameter is not in the buffer (`p.data` was set)."""
        for name, parameter in self._named.items():
            # A parameter without elements has no memory to lose.
            if (
                parameter.numel()
                and parameter.data_ptr() != self._values[self._places[name]].data_ptr()
            ):
                raise ConfigError(
                    f"outer.shard=flat: {name} is no longer a view of the buffer that shards are "
                    f"gathered in, since p.data was set; copy into it with p.data.copy_(...), or "
                    f"use outer.shard=none"
                )

    def begin(self) -> None:
        """Begin a step; the set of trained parameters may have changed."""
        self.check_memory()
        trained = [name for name, p in self._named.items() if p.requires_grad]
        if trained != self._names:
            self._reset(trained)

    def wait(self) -> None:
        """Wait for this replica's shard of the sum and release the whole gradients."""
        super().wait()
        for parameter in self._named.values():
            parameter.grad = None
        for name, owned in self.owned.items():
            owned.parameter.grad = self._gradients[self._owned_places[name]]

    def finish(self, divisor: Divisor, used: Sequence[bool]) -> None:
        """Wait for the shard of the sum, divide it, and assign it to the owned parameters."""
        self.wait()
        divisor.divide([self._gradients[self._shard]])
        self._have_gradients = {n for n, is_used in zip(self._names, used, strict=True) if is_used}
        for name, owned in self.owned.items():
            if name not in self._have_gradients:
                owned.parameter.grad = None

    def drop(self) -> None:
        """Discard the gradients of the step on all replicas."""
        self._have_gradients = set()
        for owned in self.owned.values():
            owned.parameter.grad = None

    def gather_gradients(self) -> dict[str, Tensor | None]:
        """Return copies of the whole gradients, None for a parameter that no replica used.

        All replicas must call this.
        """
        gathered = self._gradients.clone()
        for name, owned in self.owned.items():
            if owned.parameter.grad is not None:  # another tensor, if the user has replaced it
                gathered[self._owned_places[name]] = owned.parameter.grad
        self._group.start_all_gather(gathered).wait()
        return {
            name: gathered[at].view_as(self._named[name]) if name in self._have_gradients else None
            for name, at in self._places.items()
        }

    def start_gathering(self) -> CollectiveHandle:
        """Start the all-gather of the updated parameters.

        Called twice in a step if an optimizer's `step` calls that of its base class, because torch
        runs the hooks of both.
        """
        self.wait_for_parameters()
        self._gathering = self._group.start_all_gather(self._values)
        return self._gathering

    def wait_for_parameters(self) -> None:
        """Wait for the all-gather of the parameters, if one was started."""
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            gathering.wait()


class LocalGradients:
    """Gradients of parameters of one dtype on a rank without other replicas.

    They use no memory until the first backward pass allocates them: schedules that keep all
    micro-batches need the most memory just before.

    Args:
        parameters: Parameters of one dtype and device.
        device: Device of the stage.
    """

    def __init__(self, parameters: list[nn.Parameter], device: Device) -> None:
        self.parameters = parameters
        self._is_accelerator = device.is_accelerator
        self._without: list[nn.Parameter] = []

    def clear(self) -> None:
        """Release the gradients of the last step."""
        for parameter in self.parameters:
            parameter.grad = None
        self._without = self.parameters

    def unshare(self) -> None:
        """Copy gradients of the last backward pass whose memory is shared with other tensors.

        Autograd may assign the tensor that a backward function returns. Its memory may also belong
        to the gradient of another parameter, or to one that is sent to another stage (both terms of
        a sum get the same tensor), and the next micro-batch accumulates in place.
        """
        arrived = [parameter for parameter in self._without if parameter.grad is not None]
        if not arrived:
            return
        self._without = [parameter for parameter in self._without if parameter.grad is None]
        dense = [p for p in arrived if p.grad is not None and not p.grad.is_sparse]
        shared = [p for p in dense if p.grad is not None and not _is_unshared(p.grad)]
        # A pack at a time: copies of all at once would double the memory of the gradients.
        for pack in packs(shared, PACK if self._is_accelerator else 1):
            _copy_gradients(pack)
        for parameter in arrived:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()  # as those of a bucket are

    def used(self) -> list[bool]:
        """Return for each parameter whether a micro-batch used it."""
        return [parameter.grad is not None for parameter in self.parameters]

    def late(self) -> list[nn.Parameter]:
        """Return an empty list: nothing is reduced, so nothing is late."""
        return []

    def start_reduction(self, strategy: ReduceStrategy | None) -> CollectiveHandle | None:
        """Return None: there is no other replica."""
        assert strategy is None, "the stage's gradients are summed over other ranks"
        return None

    def wait(self) -> None:
        """Do nothing: nothing is reduced."""

    def finish(self, divisor: Divisor, used: Sequence[bool]) -> None:
        """Divide the gradients."""
        pairs = zip(self.parameters, used, strict=True)
        divisor.divide([p.grad for p, is_used in pairs if is_used and p.grad is not None])


def _is_unshared(gradient: Tensor) -> bool:
    """Return whether a tensor is the only user of its storage, and torch allocated the storage.

    Unneeded copies cost more than their time: malloc cannot reuse the many small blocks that are
    freed, so gradients of a stage on a CPU would sometimes need twice their memory.
    """
    memory = gradient.untyped_storage()
    return (
        memory.nbytes() == gradient.nbytes
        and memory.resizable()  # else it belongs to an array, or to another library
        and storage_use_count(memory._cdata) == _UNSHARED
    )


def _copy_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace the gradients of parameters by copies, with one kernel."""
    present = [(p, p.grad) for p in parameters if p.grad is not None]
    gradients = [gradient for _, gradient in present]
    copies = [torch.empty_like(gradient) for gradient in gradients]
    torch._foreach_copy_(copies, gradients)
    for (parameter, _), copy in zip(present, copies, strict=True):
        parameter.grad = copy
