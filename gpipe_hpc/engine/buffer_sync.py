"""Buffers that forwards change, on the ranks that hold a copy of one stage.

Replicas, and mirrored placements, run other micro-batches through the copies of a stage, so what
their layers count or average in buffers drifts apart. At the end of a step the copies are made
equal, or it is said that they are not. BatchNorm layers that are pooled are none of this.
The host waits for no device meanwhile: what is to be said of values is said when they have come.

Whether any holder has changed a buffer all of them learn where all ranks meet behind the pipeline
anyway; where none has, nothing else is sent.
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
from gpipe_hpc.engine.step_reduction import unite_flags
from gpipe_hpc.models import PooledBatchNorm
from gpipe_hpc.torch_compat import has_internal_overlap

log = logging.getLogger("gpipe_hpc.pipeline")

_MAX_SHOWN: Final = 12
_DIFFER: Final = (
    "differ between the {size} ranks that hold them and have no average (integers "
    "or bools); those of rank {first} are given to all"
)


class _Compared(NamedTuple):
    """How many holders had buffers otherwise than the first of them, on its way to the host."""

    names: Sequence[str]
    counts: AsyncHostTensor
    first: int


class DivergenceReporter:
    """Says what becomes of buffers, on the first rank of a group alone.

    What hangs on values of a device is said when these have come to the host.
    """

    def __init__(self, group: Group, position: int) -> None:
        self._group, self._position = group, position
        self._said: set[str] = set()
        self._compared: deque[_Compared] = deque()

    def ends_with(self, owner: object) -> None:
        """Say what is known by then when `owner` is dropped, or the process ends.

        Nothing is waited for: after a failure a device may never come to it.
        """
        weakref.finalize(owner, self._at_end)

    def _at_end(self) -> None:
        with suppress(RuntimeError):  # of a device that is gone
            self.say_known()

    def compare(self, names: Sequence[str], counts: AsyncHostTensor, first: int) -> None:
        """Take note of how many holders had each buffer otherwise than the one at `first`."""
        self._compared.append(_Compared(names, counts, first))

    def say_known(self) -> None:
        """Say which buffers differed, of which that is known by now: on a CPU, at once."""
        self._say_compared(AsyncHostTensor.poll)

    def say_all(self) -> None:
        """Say which buffers differed; waits for the device that has compared them."""
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
        """Say something of buffers once; in `what` stand {size} and {first}, a position."""
        new = [name for name in names if name not in self._said]
        self._said.update(new)
        if new and self._position == 0:
            shown = ", ".join(new[:_MAX_SHOWN])
            shown += f", ... ({len(new)} in all)" if len(new) > _MAX_SHOWN else ""
            filled = what.format(size=self._group.size, first=self._group.ranks[first])
            log.log(level, "buffers that forwards change: %s %s", shown, filled)


POLICIES: Final = ("average", "first", "each")
_AVERAGED: Final = "are averaged over the {size} ranks that hold them"
_FIRST: Final = "those of rank {first} are given to all"


class Place(NamedTuple):
    """Where a buffer is kept: a module, and its name there."""

    module: nn.Module
    name: str

    @property
    def buffer(self) -> torch.Tensor | None:
        """Return the buffer that is there."""
        return self.module._buffers.get(self.name)

    def put(self, value: torch.Tensor) -> None:
        """Give the buffer a value; the tensor stays where it can."""
        buffer = self.buffer
        with torch.no_grad():
            if buffer is not None and _kind(buffer) == _kind(value) and _is_writable(buffer):
                buffer.copy_(value)
            else:
                device = value.device if buffer is None else buffer.device
                self.module._buffers[self.name] = value.to(device, copy=True)


class _Found(NamedTuple):
    """A buffer at the start of a run."""

    tensor: torch.Tensor | None
    version: int


class _Offer(NamedTuple):
    """What holders have of a buffer: the first's, in `order`, is `root`'s, a position.

    `has_mean`: it is of one kind on all, of which there are averages. `is_persistent`: checkpoints
    keep it. `is_weighed`: one of the holders has seen a sample.
    """

    order: int
    root: int
    kind: tuple[Any, ...]
    has_mean: bool
    is_persistent: bool
    is_weighed: bool

    @property
    def like(self) -> torch.Tensor:
        """Return a tensor of that kind, without memory."""
        shape, dtype, _ = self.kind
        return torch.empty(shape, dtype=dtype, device="meta")

    @property
    def num_numbers(self) -> int:
        """Return how many real numbers it holds."""
        return self.like.numel() * (2 if self.like.is_complex() else 1)


class BufferSynchronizer:
    """The buffers of one stage on one rank, and how its holders make them equal.

    `policy`: average (of floating values, each holder's weighing as many samples as it has seen;
    others are the first's), first (the first holder's that has seen a sample) or each
    (as they are). `pooled`: with the running statistics of BatchNorm, which otherwise are summed.
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
        self._table: dict[str, Place] = {}
        self._names = sorted(self._places())
        self._num_slots = max(1, len(self._names))  # all ranks know it, so it stays
        self._kinds = self._kinds_now()
        self._before: dict[str, _Found] = {}
        self._changed: set[str] = set()  # since the holders were made equal
        self._num_samples = 0  # likewise
        self._on_host = frozenset(self._on_host_now())  # on some holder
        self._sayings = DivergenceReporter(group, self._position)
        self._sayings.ends_with(self)

    def begin(self) -> None:
        """Begin a run of the stage."""
        if self._group.size > 1:
            self._sayings.say_known()
            if self._children_now() != self._children:
                self._modules = modules_of(self._layers, pooled=self._pooled)
                self._children = self._children_now()
            self._before = {name: _found(place) for name, place in self._places().items()}

    def say_all(self) -> None:
        """Say what is left to be said of buffers that differed; waits for the device."""
        self._sayings.say_all()

    def end(self, num_samples: int) -> None:
        """Note what a run has changed, in which so many samples were seen."""
        if self._group.size == 1:
            return
        self._num_samples += num_samples
        none = _Found(None, 0)
        for name, place in self._places().items():
            before, now = self._before.get(name, none), _found(place)
            if now.tensor is not before.tensor or now.version != before.version:
                self._changed.add(name)
        self._before = {}

    @property
    def num_flags(self) -> int:
        """Return how many `flags` there are, the same all along."""
        return self._num_slots + 1 + self._group.size if self._group.size > 1 else 0

    def flags(self) -> list[bool]:
        """Return what every holder must know of every other."""
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
        """Return which buffers are changed; where they are more or fewer by now, whether any is."""
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
        """Count all buffers as changed, unless each holder keeps its own: nobody knows of which."""
        if self._group.size > 1 and self._policy != "each":
            self._changed = set(self._names)

    def settle(self, united: Sequence[bool], weight: float | None = None) -> None:
        """Make the holders equal, or say that they are not; `united`: the flags of all holders.

        `weight`: what this holder counts for in an average; None: the samples that it has seen.
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
        """Make buffers equal that have one shape and dtype on all holders."""
        places = self._places()
        averaged = [n for n in changed if self._policy == "average" and _is_float(places[n])]
        copied = [n for n in changed if n not in set(averaged)]
        for names, buffers in self._sides(averaged):
            for name, mean in zip(names, _averages(buffers, weight, self._group), strict=True):
                places[name].put(mean)
        self._sayings.say(averaged, logging.INFO, _AVERAGED)
        for names, buffers in self._sides(copied):
            values = _broadcast(buffers, self._group, self._group.ranks[first])
            if self._policy != "first":
                self._sayings.compare(names, self._compared(buffers, values), first)
            for name, value in zip(names, values, strict=True):
                places[name].put(value)
        if self._policy == "first":
            self._sayings.say(copied, logging.INFO, _FIRST, first)
        self._sayings.say_known()

    def _sides(self, names: Sequence[str]) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Yield the buffers of the device and those of the host, by name, each side if it has any.

        To pack those of one side with those of the other the host would wait for the device.
        """
        places = self._places()
        there = [name for name in names if name not in self._on_host]
        if there:
            yield there, [_present(places[name]) for name in there]
        here = [name for name in names if name in self._on_host]
        if here:
            yield here, [self._device.fetch(_present(places[name])) for name in here]

    def _is_on_host(self, place: Place) -> bool:
        """Say whether there is a buffer, but not on the device of the stage."""
        return place.buffer is not None and not self._device.holds(place.buffer)

    def _on_host_now(self) -> list[str]:
        return sorted(n for n, place in self._places().items() if self._is_on_host(place))

    def _compared(
        self, buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> AsyncHostTensor:
        """Learn how many holders had each buffer otherwise than the first; no device is awaited."""
        pairs = zip(buffers, values, strict=True)
        counts = torch.stack([_num_apart(*pair) for pair in pairs])
        self._group.all_reduce(counts)
        return AsyncHostTensor.of(counts, self._device)

    def _settle_unusual(self, first: int) -> None:
        """Make buffers equal that are new, gone, or of other shapes on some holder."""
        places = self._places()
        own = {n for n, kind in self._kinds_now().items() if self._kinds.get(n, ()) != kind}
        own |= self._changed | {name for name in self._names if name not in places}
        told = self._group.merge_object((sorted(own), sorted(places), self._on_host_now()), _all)
        wanted, self._names, on_host = told
        self._on_host = frozenset(on_host)
        if self._policy == "each":
            self._say_each(wanted)
        else:
            self._share(wanted, first)
        self._kinds = self._kinds_now()  # where they are now, all have been told

    def _share(self, names: Sequence[str], first: int) -> None:
        """Give one value to all that holders have of each name.

        A holder hears of each name once, however many others hold it.
        """
        places = self._places()
        own = {n: places[n] for n in names if n in places and places[n].buffer is not None}
        offers = {name: self._offer(place, first) for name, place in own.items()}
        merged = self._group.merge_object(offers, _united)
        found = {name: _Offer._make(offer) for name, offer in sorted(merged.items())}
        is_mean = self._policy == "average"
        averaged = {n: each for n, each in found.items() if is_mean and each.has_mean}
        values = self._means(own, averaged)
        for root in sorted({each.root for n, each in found.items() if n not in averaged}):
            given = [n for n, each in found.items() if n not in averaged and each.root == root]
            is_here = root == self._position
            # By the host: what one rank's device has, another's may not read.
            there = {n: _present(own[n]) for n in given} if is_here else {}
            kept = {n: self._device.fetch(value).clone() for n, value in there.items()}
            values |= self._group.broadcast_object(kept, self._group.ranks[root])
        what = (
            "are new, or of other shapes or devices, on some of the {size} ranks that hold them; "
            "those of rank {first} are given to all"
        )
        for name, each in found.items():
            if name in averaged:
                self._sayings.say([name], logging.INFO, _AVERAGED)
            else:
                self._sayings.say([name], logging.WARNING, what, each.root)
            self._register(name, values[name], is_persistent=each.is_persistent)

    def _offer(self, place: Place, first: int) -> _Offer:
        value = _present(place)
        return _Offer(
            -1 if self._position == first else self._position,
            self._position,
            _kind(value),
            _may_average(value),
            place.name not in place.module._non_persistent_buffers_set,
            self._num_samples > 0,
        )

    def _means(
        self, own: Mapping[str, Place], offers: Mapping[str, _Offer]
    ) -> dict[str, torch.Tensor]:
        """Return the average, over those who have it, of each buffer on offer."""
        if not offers:
            return {}
        rows = []
        for name, each in offers.items():
            weight = float(self._num_samples if each.is_weighed else 1) if name in own else 0.0
            row = torch.zeros(each.num_numbers + 1, dtype=torch.float64)
            if weight:
                row[:-1] = _wide(self._device.fetch(_present(own[name]))) * weight
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
            what = "belong to a module that only some of the {size} ranks have made: left so"
            self._sayings.say([name], logging.WARNING, what)
            return
        device = next((t.device for t in module.parameters()), value.device)
        module.register_buffer(own, value.to(device, copy=True), persistent=is_persistent)

    def _children_now(self) -> list[int]:
        """Return what tells whether there are other modules: to walk them all takes long."""
        return [id(child) for _, m in self._modules for child in m._modules.values()]

    def _places(self) -> Mapping[str, Place]:
        """Return where buffers are kept, by global name; made anew where names have changed."""
        named = [(path, m, tuple(m._buffers)) for path, m in self._modules if m._buffers]
        if named != self._named:
            self._named = named
            self._table = {f"{path}.{n}": Place(m, n) for path, m, names in named for n in names}
        return self._table

    def _kinds_now(self) -> dict[str, Any]:
        places = self._places().items()
        return {name: (_kind_at(place), self._is_on_host(place)) for name, place in places}

    def _say_each(self, names: Iterable[str]) -> None:
        what = (
            "are left as they are on each of the {size} ranks that hold them (buffers=each), where "
            "they drift apart; a checkpoint keeps those of rank {first}"
        )
        self._sayings.say(names, logging.WARNING, what, 0)


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


def plain_buffers(layers: Mapping[int, nn.Module]) -> list[Place]:
    """Return where the layers keep plain buffers, also those that no checkpoint keeps."""
    modules = modules_of(layers, pooled=True)
    places = [Place(module, name) for _, module in modules for name in module._buffers]
    return [p for p in places if p.buffer is not None and _is_plain(_present(p))]


def copy_of(place: Place) -> torch.Tensor:
    """Return a copy of what a buffer holds, in one row or none."""
    return _present(place).resolve_conj().resolve_neg().contiguous().clone()


def take_over(place: Place, value: torch.Tensor) -> None:
    """Give a buffer a value of its own shape; what has it already is left alone."""
    if not _same(_present(place), value):
        place.put(value)


def _found(place: Place) -> _Found:
    buffer = place.buffer
    is_counted = buffer is not None and not buffer.is_inference()
    return _Found(buffer, buffer._version if buffer is not None and is_counted else 0)


def _present(place: Place) -> torch.Tensor:
    buffer = place.buffer
    assert buffer is not None, f"buffer {place.name} is gone"
    return buffer.detach()


_Names = tuple[list[str], list[str], list[str]]


def _all(one: _Names, other: _Names) -> _Names:
    """Return the names in either, of each of three lists."""
    first, second, third = (sorted({*a, *b}) for a, b in zip(one, other, strict=True))
    return first, second, third


def _united(one: dict[str, _Offer], other: dict[str, _Offer]) -> dict[str, _Offer]:
    """Return what some holders and others have of each name."""
    shared = one.keys() & other.keys()
    pairs = {n: (_Offer._make(one[n]), _Offer._make(other[n])) for n in shared}
    return one | other | {name: _joined(*pair) for name, pair in pairs.items()}


def _joined(one: _Offer, other: _Offer) -> _Offer:
    is_alike = one.kind == other.kind
    return min(one, other, key=lambda offer: offer.order)._replace(
        has_mean=one.has_mean and other.has_mean and is_alike,
        is_weighed=one.is_weighed or other.is_weighed,
    )


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.layout


def _kind_at(place: Place) -> tuple[Any, ...] | None:
    return None if place.buffer is None else _kind(place.buffer)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _is_writable(tensor: torch.Tensor) -> bool:
    return not tensor.is_inference() and (
        not _is_plain(tensor) or has_internal_overlap(tensor) == 0
    )


def _may_average(tensor: torch.Tensor) -> bool:
    return _is_plain(tensor) and (tensor.is_floating_point() or tensor.is_complex())


def _is_float(place: Place) -> bool:
    return _may_average(_present(place))


def _averages(
    buffers: Sequence[torch.Tensor], weight: float, group: Group
) -> Iterator[torch.Tensor]:
    """Yield the average of each buffer over the group; `weight`: this rank's."""
    wide = [_wide(buffer) for buffer in buffers]
    # Nothing of a rank that has seen nothing: an infinity there would make NaNs.
    terms = [w * weight if weight else torch.zeros_like(w) for w in wide]
    flat = torch.cat([*terms, terms[0].new_full((1,), weight)])
    group.all_reduce(flat)
    means = torch.split(flat[:-1] / flat[-1], [w.numel() for w in wide])
    for buffer, mean in zip(buffers, means, strict=True):
        yield _narrow(mean, buffer)


def _wide(buffer: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a buffer as float64[n]."""
    if buffer.is_complex():
        buffer = torch.view_as_real(buffer.to(torch.complex128).resolve_conj())
    return buffer.double().reshape(-1)


def _narrow(numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if like.is_complex():
        return torch.view_as_complex(numbers.clone().view(*like.shape, 2)).to(like.dtype)
    return numbers.view(like.shape).to(like.dtype)


def _broadcast(buffers: Sequence[torch.Tensor], group: Group, root: int) -> list[torch.Tensor]:
    """Return world rank `root`'s buffers, of any dtype, in the shapes of one's own."""
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
    """Return, as int32[] where they are, whether two tensors differ in any bit."""
    return (bytes_of(own) != bytes_of(other)).any().to(torch.int32)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Say whether two tensors are equal to the bit: a NaN is one, too."""
    return torch.equal(bytes_of(left), bytes_of(right))
