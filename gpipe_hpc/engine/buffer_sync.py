"""Synchronization of buffers that forwards change, over the ranks with a copy of one stage.

Copies of a stage run different micro-batches, so counters and averages in their buffers diverge. At
the end of a step the copies are made equal, or a warning reports that they differ. Pooled BatchNorm
layers are left out. The host does not wait for a device: messages that depend on values are logged
after these have been copied to the host.

The step's all-reduce contains flags of changed buffers; if no copy has changed one, nothing else is
sent.
"""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from gpipe_hpc.comm.collectives.group import Group
from gpipe_hpc.comm.collectives.packed import bytes_of
from gpipe_hpc.device.deferred import AsyncHostTensor
from gpipe_hpc.device.device import Device
from gpipe_hpc.engine.buffers import version_of
from gpipe_hpc.engine.step_reduction import unite_flags
from gpipe_hpc.models import PooledBatchNorm
from gpipe_hpc.torch_compat import has_internal_overlap

log = logging.getLogger("gpipe_hpc.pipeline")

_MAX_SHOWN: Final = 12
_DIFFER: Final = (
    "differ between the {size} ranks that hold them and cannot be averaged (integers "
    "or bools); all ranks get the values of rank {first}"
)


class DivergenceReporter:
    """Logs how buffers were synchronized, on the first rank of a group only.

    Messages that depend on values of a device are logged after these have been copied to the host.
    """

    def __init__(self, group: Group, position: int) -> None:
        self._group, self._position = group, position
        self._said: set[str] = set()
        # Names, for each the number of ranks that differed from the first, and the first rank.
        self._compared: deque[tuple[Sequence[str], AsyncHostTensor, int]] = deque()

    def ends_with(self, owner: object) -> None:
        """Log pending messages when `owner` is deleted, or the process ends.

        Does not wait: after a failure, a device may never finish.
        """
        weakref.finalize(owner, self._at_end)

    def _at_end(self) -> None:
        with suppress(RuntimeError):  # of a device that is not available any more
            self.log_arrived()

    def compare(self, names: Sequence[str], counts: AsyncHostTensor, first: int) -> None:
        """Store for each buffer the number of ranks whose values differed from rank `first`'s."""
        self._compared.append((names, counts, first))

    def log_arrived(self) -> None:
        """Log the buffers that differed and whose counts have arrived on the host."""
        self._say_compared(AsyncHostTensor.poll)

    def log_pending(self) -> None:
        """Log the buffers that differed; waits for the device."""
        self._say_compared(AsyncHostTensor.read)

    def _say_compared(self, values: Callable[[AsyncHostTensor], torch.Tensor | None]) -> None:
        while self._compared:
            names, fetched, first = self._compared[0]
            counts = values(fetched)
            if counts is None:
                return
            self._compared.popleft()
            apart = [name for name, count in zip(names, counts.tolist(), strict=True) if count]
            self.say(apart, logging.WARNING, _DIFFER, first)

    def say(self, names: Iterable[str], level: int, what: str, first: int = 0) -> None:
        """Log a message once for each buffer.

        `what` may contain {size}, the number of ranks, and {first}, the rank at position `first`.
        """
        new = [name for name in names if name not in self._said]
        self._said.update(new)
        if new and self._position == 0:
            shown = ", ".join(new[:_MAX_SHOWN])
            shown += f", ... ({len(new)} in all)" if len(new) > _MAX_SHOWN else ""
            filled = what.format(size=self._group.size, first=self._group.ranks[first])
            log.log(level, "buffers that forwards change: %s %s", shown, filled)


POLICIES: Final = ("average", "first", "each")
_AVERAGED: Final = "are averaged over the {size} ranks that hold them"
_FIRST: Final = "are copied from rank {first} to all {size} ranks that hold them"


class BufferPlace(NamedTuple):
    """The module and the name under which a buffer is registered."""

    module: nn.Module
    name: str

    @property
    def buffer(self) -> torch.Tensor | None:
        """Return the buffer, or None."""
        return self.module._buffers.get(self.name)

    def put(self, value: torch.Tensor) -> None:
        """Set the buffer's value, in place if possible."""
        buffer = self.buffer
        with torch.no_grad():
            if buffer is not None and _kind(buffer) == _kind(value) and _is_writable(buffer):
                buffer.copy_(value)
            else:
                device = value.device if buffer is None else buffer.device
                self.module._buffers[self.name] = value.to(device, copy=True)


class _SourceBuffer(NamedTuple):
    """The rank that provides the value of a buffer, and properties of the buffer on all ranks.

    Attributes:
        order: Ranks with a smaller number take precedence.
        root: Position of the rank in the group.
        kind: Shape, dtype and layout on that rank.
        has_mean: All ranks have the same kind, and it can be averaged.
        is_persistent: Checkpoints store the buffer.
        is_weighed: Some rank with the buffer has processed a sample.
    """

    order: int
    root: int
    kind: tuple[Any, ...]
    has_mean: bool
    is_persistent: bool
    is_weighed: bool

    @property
    def like(self) -> torch.Tensor:
        """Return a meta tensor of that kind."""
        shape, dtype, _ = self.kind
        return torch.empty(shape, dtype=dtype, device="meta")

    @property
    def num_numbers(self) -> int:
        """Return the number of real numbers in the buffer."""
        return self.like.numel() * (2 if self.like.is_complex() else 1)


class BufferSynchronizer:
    """Makes the buffers of one stage equal on all ranks that hold a copy of it.

    Args:
        layers: The layers of the stage by global index.
        group: The ranks that hold a copy.
        rank: The world rank.
        policy: ``average``: floating-point buffers are averaged, weighted by the samples that each
            rank has processed, and others taken from the first rank; ``first``: all are taken from
            the first rank that has processed a sample; ``each``: none is synchronized.
        device: Device of the stage.
        pooled: Include running statistics of BatchNorm, which are otherwise summed.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        group: Group,
        rank: int,
        policy: str,
        device: Device,
        *,
        pooled: bool = False,
    ) -> None:
        assert policy in POLICIES, policy
        self._device = device
        self._layers, self._group, self._policy = dict(layers), group, policy
        self._position = group.ranks.index(rank)
        self._pooled = pooled
        self._modules = modules_of(self._layers, pooled=pooled)
        self._children = self._children_now()
        self._named: list[tuple[str, nn.Module, tuple[str, ...]]] = []  # what the table is of
        self._table: dict[str, BufferPlace] = {}
        self._names = sorted(self._places())
        self._num_slots = max(1, len(self._names))  # equal on all ranks, so it never changes
        self._kinds = self._kinds_now()
        self._before: dict[str, tuple[torch.Tensor | None, int]] = {}  # tensor and version
        self._changed: set[str] = set()  # since the copies were made equal
        self._num_samples = 0  # likewise
        self._on_host = frozenset(self._on_host_now())  # on some rank
        self._reporter = DivergenceReporter(group, self._position)
        self._reporter.ends_with(self)

    def begin(self) -> None:
        """Begin a run of the stage."""
        if self._group.size > 1:
            self._reporter.log_arrived()
            if self._children_now() != self._children:
                self._modules = modules_of(self._layers, pooled=self._pooled)
                self._children = self._children_now()
            self._before = {name: _version_at(place) for name, place in self._places().items()}

    def log_pending(self) -> None:
        """Log pending messages about buffers that differed; waits for the device."""
        self._reporter.log_pending()

    def end(self, num_samples: int) -> None:
        """Record the buffers that a run of `num_samples` samples has changed."""
        if self._group.size == 1:
            return
        self._num_samples += num_samples
        for name, place in self._places().items():
            before, version = self._before.get(name, (None, 0))
            tensor, new_version = _version_at(place)
            if tensor is not before or new_version != version:
                self._changed.add(name)
        self._before = {}

    @property
    def num_flags(self) -> int:
        """Return the number of `flags`, which is constant."""
        return self._num_slots + 1 + self._group.size if self._group.size > 1 else 0

    def flags(self) -> list[bool]:
        """Return the flags that ranks combine by logical or before `settle`."""
        if self._group.size == 1:
            return []
        places = self._places()
        changed = [places[name].buffer for name in self._changed if name in places]
        is_unusual = (
            self._kinds_now() != self._kinds
            or any(name not in places for name in self._names)
            or any(buffer is None or not _is_plain(buffer) for buffer in changed)
        )
        ran = [False] * self._group.size
        ran[self._position] = self._num_samples > 0
        return [*self._slots(), is_unusual, *ran]

    def _slots(self) -> list[bool]:
        """Return whether each buffer has changed; one flag for all if buffers were added."""
        if len(self._names) == self._num_slots:
            return [name in self._changed for name in self._names]
        return [bool(self._changed), *[False] * (self._num_slots - 1)]

    def _changed_anywhere(self, slots: Sequence[bool]) -> list[str]:
        if not any(slots):
            return []
        if len(self._names) != self._num_slots:
            slots = unite_flags([name in self._changed for name in self._names], self._group)
        return [name for name, flag in zip(self._names, slots, strict=True) if flag]

    def suspect_all(self) -> None:
        """Mark all buffers as changed, unless the policy is ``each``."""
        if self._group.size > 1 and self._policy != "each":
            self._changed = set(self._names)

    def settle(self, united: Sequence[bool], weight: float | None = None) -> None:
        """Synchronize the buffers, or warn that they differ.

        Args:
            united: The flags of all ranks of the group, combined.
            weight: Weight of this rank in averages; None for the number of its samples.
        """
        if self._group.size == 1:
            return
        is_unusual, *ran = united[self._num_slots :]
        first = ran.index(True) if any(ran) else 0
        changed = [] if is_unusual else self._changed_anywhere(united[: self._num_slots])
        if is_unusual:
            self._settle_unusual(first)
        elif changed and self._policy == "each":
            self._say_each(changed)
        elif changed:
            counted = float(self._num_samples) if weight is None else weight
            self._settle_alike(changed, first, counted if any(ran) else 1.0)
        self._changed, self._num_samples = set(), 0

    def _settle_alike(self, changed: Sequence[str], first: int, weight: float) -> None:
        """Synchronize buffers with the same shape and dtype on all ranks."""
        places = self._places()
        averaged = [n for n in changed if self._policy == "average" and _is_float(places[n])]
        copied = [n for n in changed if n not in set(averaged)]
        for names, buffers in self._sides(averaged):
            for name, mean in zip(names, _averages(buffers, weight, self._group), strict=True):
                places[name].put(mean)
        self._reporter.say(averaged, logging.INFO, _AVERAGED)
        for names, buffers in self._sides(copied):
            values = _broadcast(buffers, self._group, self._group.ranks[first])
            if self._policy != "first":
                self._reporter.compare(names, self._compared(buffers, values), first)
            for name, value in zip(names, values, strict=True):
                places[name].put(value)
        if self._policy == "first":
            self._reporter.say(copied, logging.INFO, _FIRST, first)
        self._reporter.log_arrived()

    def _sides(self, names: Sequence[str]) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Yield names and buffers on the device, then those on the host, if there are any.

        Packing both together would make the host wait for the device.
        """
        places = self._places()
        there = [name for name in names if name not in self._on_host]
        if there:
            yield there, [_present(places[name]) for name in there]
        here = [name for name in names if name in self._on_host]
        if here:
            yield here, [self._device.to_host(_present(places[name])) for name in here]

    def _is_on_host(self, place: BufferPlace) -> bool:
        """Return whether there is a buffer that is not on the device of the stage."""
        return place.buffer is not None and not self._device.holds(place.buffer)

    def _on_host_now(self) -> list[str]:
        return sorted(n for n, place in self._places().items() if self._is_on_host(place))

    def _compared(
        self, buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> AsyncHostTensor:
        """Return for each buffer the number of ranks that differed; does not wait for a device."""
        pairs = zip(buffers, values, strict=True)
        counts = torch.stack([_num_apart(*pair) for pair in pairs])
        self._group.all_reduce(counts)
        return AsyncHostTensor.of(counts, self._device)

    def _settle_unusual(self, first: int) -> None:
        """Synchronize buffers that are new, missing, or of another shape on some rank."""
        places = self._places()
        own = {n for n, kind in self._kinds_now().items() if self._kinds.get(n, ()) != kind}
        own |= self._changed | {name for name in self._names if name not in places}
        agreed = self._group.merge_object((sorted(own), sorted(places), self._on_host_now()), _all)
        wanted, self._names, on_host = agreed
        self._on_host = frozenset(on_host)
        if self._policy == "each":
            self._say_each(wanted)
        else:
            self._share(wanted, first)
        self._kinds = self._kinds_now()

    def _share(self, names: Sequence[str], first: int) -> None:
        """Set each named buffer to the same value on all ranks that have it."""
        places = self._places()
        own = {n: places[n] for n in names if n in places and places[n].buffer is not None}
        offers = {name: self._offer(place, first) for name, place in own.items()}
        merged = self._group.merge_object(offers, _united)
        found = {name: _SourceBuffer._make(offer) for name, offer in sorted(merged.items())}
        is_mean = self._policy == "average"
        averaged = {n: each for n, each in found.items() if is_mean and each.has_mean}
        values = self._means(own, averaged)
        for root in sorted({each.root for n, each in found.items() if n not in averaged}):
            given = [n for n, each in found.items() if n not in averaged and each.root == root]
            is_here = root == self._position
            # Through the host, as one rank's device may be unknown to another.
            there = {n: _present(own[n]) for n in given} if is_here else {}
            kept = {n: self._device.to_host(value).clone() for n, value in there.items()}
            values |= self._group.broadcast_object(kept, self._group.ranks[root])
        what = (
            "are new, or have other shapes or devices, on some of the {size} ranks that hold them; "
            "all ranks get the values of rank {first}"
        )
        for name, each in found.items():
            if name in averaged:
                self._reporter.say([name], logging.INFO, _AVERAGED)
            else:
                self._reporter.say([name], logging.WARNING, what, each.root)
            self._register(name, values[name], is_persistent=each.is_persistent)

    def _offer(self, place: BufferPlace, first: int) -> _SourceBuffer:
        value = _present(place)
        return _SourceBuffer(
            -1 if self._position == first else self._position,
            self._position,
            _kind(value),
            _may_average(value),
            place.name not in place.module._non_persistent_buffers_set,
            self._num_samples > 0,
        )

    def _means(
        self, own: Mapping[str, BufferPlace], offers: Mapping[str, _SourceBuffer]
    ) -> dict[str, torch.Tensor]:
        """Return the average of each buffer over the ranks that have it."""
        if not offers:
            return {}
        rows = []
        for name, each in offers.items():
            weight = float(self._num_samples if each.is_weighed else 1) if name in own else 0.0
            row = torch.zeros(each.num_numbers + 1, dtype=torch.float64)
            if weight:
                row[:-1] = _wide(self._device.to_host(_present(own[name]))) * weight
                row[-1] = weight
            rows.append(row)
        flat = torch.cat(rows)
        self._group.all_reduce(flat)
        sums = torch.split(flat, [len(row) for row in rows])
        return {
            name: _narrow(row[:-1] / row[-1], each.like)
            for (name, each), row in zip(offers.items(), sums, strict=True)
        }

    def _register(self, name: str, value: torch.Tensor, *, is_persistent: bool) -> None:
        places = self._places()
        if name in places:
            places[name].put(value)
            return
        path, _, own = name.rpartition(".")
        _, index, *inner = path.split(".")
        try:
            module = self._layers[int(index)].get_submodule(".".join(inner))
        except AttributeError:
            what = (
                "belong to a module that exists on only some of the {size} ranks: not synchronised"
            )
            self._reporter.say([name], logging.WARNING, what)
            return
        device = next((t.device for t in module.parameters()), value.device)
        module.register_buffer(own, value.to(device, copy=True), persistent=is_persistent)

    def _children_now(self) -> list[int]:
        """Return a fingerprint of the module tree, cheaper than a full walk."""
        return [id(child) for _, m in self._modules for child in m._modules.values()]

    def _places(self) -> Mapping[str, BufferPlace]:
        """Return all buffers by global name; the table is rebuilt if names have changed."""
        named = [(path, m, tuple(m._buffers)) for path, m in self._modules if m._buffers]
        if named != self._named:
            self._named = named
            self._table = {
                f"{path}.{n}": BufferPlace(m, n) for path, m, names in named for n in names
            }
        return self._table

    def _kinds_now(self) -> dict[str, Any]:
        places = self._places().items()
        return {name: (_kind_at(place), self._is_on_host(place)) for name, place in places}

    def _say_each(self, names: Iterable[str]) -> None:
        what = (
            "are not synchronised between the {size} ranks that hold them (buffers=each), so their "
            "values diverge; a checkpoint contains those of rank {first}"
        )
        self._reporter.say(names, logging.WARNING, what, 0)


def modules_of(
    layers: Mapping[int, nn.Module], *, pooled: bool = False
) -> list[tuple[str, nn.Module]]:
    """Return all modules of the layers by global name, each once.

    `pooled`: with BatchNorm layers whose statistics are pooled.
    """
    modules: dict[int, tuple[str, nn.Module]] = {}
    for index, layer in layers.items():
        for path, module in layer.named_modules():
            is_pooled = isinstance(module, PooledBatchNorm) and module.running_mean is not None
            if pooled or not is_pooled:
                name = f"layers.{index}.{path}" if path else f"layers.{index}"
                modules.setdefault(id(module), (name, module))
    return list(modules.values())


def plain_buffers(layers: Mapping[int, nn.Module]) -> list[BufferPlace]:
    """Return the plain buffers of the layers, including those that are not persistent."""
    modules = modules_of(layers, pooled=True)
    places = [BufferPlace(module, name) for _, module in modules for name in module._buffers]
    return [p for p in places if p.buffer is not None and _is_plain(_present(p))]


def copy_of(place: BufferPlace) -> torch.Tensor:
    """Return a contiguous copy of a buffer."""
    return _present(place).resolve_conj().resolve_neg().contiguous().clone()


def take_over(place: BufferPlace, value: torch.Tensor) -> None:
    """Set a buffer to a value of the same shape, unless it is equal already."""
    if not _same(_present(place), value):
        place.put(value)


def _version_at(place: BufferPlace) -> tuple[torch.Tensor | None, int]:
    """Return a buffer and its version, see `version_of`."""
    buffer = place.buffer
    return buffer, 0 if buffer is None else version_of(buffer)


def _present(place: BufferPlace) -> torch.Tensor:
    buffer = place.buffer
    assert buffer is not None, f"buffer {place.name} is gone"
    return buffer.detach()


_Names = tuple[list[str], list[str], list[str]]


def _all(one: _Names, other: _Names) -> _Names:
    """Return the sorted union of each of three lists of names."""
    first, second, third = (sorted({*a, *b}) for a, b in zip(one, other, strict=True))
    return first, second, third


def _united(
    one: dict[str, _SourceBuffer], other: dict[str, _SourceBuffer]
) -> dict[str, _SourceBuffer]:
    """Merge the source buffers of two sets of ranks by name."""
    shared = one.keys() & other.keys()
    pairs = {n: (_SourceBuffer._make(one[n]), _SourceBuffer._make(other[n])) for n in shared}
    return one | other | {name: _joined(*pair) for name, pair in pairs.items()}


def _joined(one: _SourceBuffer, other: _SourceBuffer) -> _SourceBuffer:
    is_alike = one.kind == other.kind
    return min(one, other, key=lambda offer: offer.order)._replace(
        has_mean=one.has_mean and other.has_mean and is_alike,
        is_weighed=one.is_weighed or other.is_weighed,
    )


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.layout


def _kind_at(place: BufferPlace) -> tuple[Any, ...] | None:
    return None if place.buffer is None else _kind(place.buffer)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _is_writable(tensor: torch.Tensor) -> bool:
    return not tensor.is_inference() and (
        not _is_plain(tensor) or has_internal_overlap(tensor) == 0
    )


def _may_average(tensor: torch.Tensor) -> bool:
    return _is_plain(tensor) and (tensor.is_floating_point() or tensor.is_complex())


def _is_float(place: BufferPlace) -> bool:
    return _may_average(_present(place))


def _averages(
    buffers: Sequence[torch.Tensor], weight: float, group: Group
) -> Iterator[torch.Tensor]:
    """Yield the average of each buffer over the group; `weight`: this rank's."""
    wide = [_wide(buffer) for buffer in buffers]
    # Zeros for weight 0: an infinity times 0 would be NaN.
    terms = [w * weight if weight else torch.zeros_like(w) for w in wide]
    flat = torch.cat([*terms, terms[0].new_full((1,), weight)])
    group.all_reduce(flat)
    means = torch.split(flat[:-1] / flat[-1], [w.numel() for w in wide])
    for buffer, mean in zip(buffers, means, strict=True):
        yield _narrow(mean, buffer)


def _wide(buffer: torch.Tensor) -> torch.Tensor:
    """Return the real numbers of a buffer as float64[n]."""
    if buffer.is_complex():
        buffer = torch.view_as_real(buffer.to(torch.complex128).resolve_conj())
    return buffer.double().reshape(-1)


def _narrow(numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if like.is_complex():
        return torch.view_as_complex(numbers.clone().view(*like.shape, 2)).to(like.dtype)
    return numbers.view(like.shape).to(like.dtype)


def _broadcast(buffers: Sequence[torch.Tensor], group: Group, root: int) -> list[torch.Tensor]:
    """Return the values of `buffers` on world rank `root`; shapes and dtypes are equal there."""
    if not buffers:
        return []
    parts = [bytes_of(buffer) for buffer in buffers]
    flat = torch.cat(parts)
    group.broadcast(flat, root)
    arrived = torch.split(flat, [part.numel() for part in parts])
    return [
        part.clone().view(buffer.dtype).view(buffer.shape)
        for part, buffer in zip(arrived, buffers, strict=True)
    ]


def _num_apart(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return int32[] on their device: 1 if two tensors differ in any bit."""
    return (bytes_of(own) != bytes_of(other)).any().to(torch.int32)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are equal to the bit; a NaN equals itself."""
    return torch.equal(bytes_of(left), bytes_of(right))
