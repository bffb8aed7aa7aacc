"""Interception of every torch operator of a rank, including backwards: memory used, and where."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulated.storages import Kind, parts_of, storage_of
from tests.simulated.tracker import Access

if TYPE_CHECKING:
    from tests.simulated.device import SimulatedDevice

aten = torch.ops.aten

# The host needs a value, or a size that depends on values, to go on.
READS = {
    aten._local_scalar_dense,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.unique_dim_consecutive,
    aten.repeat_interleave,
    aten.bincount,
    aten._coalesce,
    aten._assert_scalar,
    aten._linalg_check_errors,
}
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# Arguments that these bring to the device where they lie on the host. A value is one number.
_BRINGING = {
    "indices": _INDEXING,
    "values": _INDEXING - {aten.index},
    "src": {aten._foreach_copy_},
}
_FACTORY = re.compile(r"aten::(new_.*|.*_like)$")
_EMPTY = re.compile(r"aten::(new_)?empty.*$")
_VIEWS_UNSAID = {aten._unsafe_view, aten.lift, aten.lift_fresh, aten.alias, aten.detach}
# Statistics that are written without the schema's saying so.
_WRITES_UNSAID = {aten.native_batch_norm: {"running_mean", "running_var"}}
# Operators whose arguments may be 0-dimensional tensors of the host, besides the pointwise ones.
_TAKES_SCALARS = {
    aten.fill_,
    aten.fill,
    aten.masked_fill_,
    aten.masked_fill,
    aten.index_put_,
    aten._index_put_impl_,
    aten.index_fill_,
    aten.index_fill,
}


class Move(NamedTuple):
    """A copy between host and device, which is not visible from CPU tensors alone."""

    to: Kind
    non_blocking: bool


class Local(threading.local):
    """State of a thread: the running factory call, and the intended move."""

    factory: Kind | None = None
    is_number: bool = False  # what torch makes of Python's numbers is an argument of a kernel
    move: Move | None = None


@dataclass(frozen=True)
class Shape:
    """Accesses of an operator to its arguments: (reads, writes) by position and name."""

    name: str
    packet: Any
    arguments: tuple[tuple[str, bool, bool], ...]
    touches_nothing: bool
    takes_scalars: bool
    is_empty: bool
    makes_new: bool


@cache
def shape_of(func: Any) -> Shape:
    schema, packet = func._schema, func.overloadpacket
    infos = [argument.alias_info for argument in schema.arguments if argument.alias_info]
    is_view = bool(infos) and not any(info.is_write for info in infos)
    views = is_view or torch.Tag.inplace_view in func.tags or packet in _VIEWS_UNSAID
    only_shapes = bool(_FACTORY.match(schema.name))
    unsaid = _WRITES_UNSAID.get(packet, ())
    arguments = []
    for argument in schema.arguments:
        alias = argument.alias_info
        writes = (alias is not None and alias.is_write) or argument.name in unsaid
        reads = not only_shapes and alias is None
        arguments.append((argument.name, reads and not views, writes and not views))
    return Shape(
        schema.name.removeprefix("aten::"),
        packet,
        tuple(arguments),
        views or packet is aten.set_,
        torch.Tag.pointwise in func.tags or packet in _TAKES_SCALARS,
        bool(_EMPTY.match(schema.name)),
        only_shapes,
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


class SimulationMode(TorchDispatchMode):
    """Mode that runs the operators of one thread on the current stream of its rank's device."""

    def __init__(self, device: SimulatedDevice, local: Local) -> None:
        super().__init__()
        self._device, self._tracker, self._local = device, device.tracker, local

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile layers in this mode; compiled code runs in it like any other."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shape = shape_of(func)
        if shape.packet in (aten.copy_, aten._to_copy):
            return self._copy(func, shape, args, kwargs)
        given = list(_named(shape, args, kwargs))
        kinds = {id(t): self._tracker.kind_of(t) for _, _, _, t in given}
        on_device = Kind.DEVICE in kinds.values()
        if shape.makes_new and self._local.factory is Kind.HOST:
            on_device = False
        on_device = on_device or _has_index(kwargs.get("device"))
        outputs = func(*args, **kwargs)
        if shape.touches_nothing:
            if shape.packet in (aten.lift_fresh, aten.lift) and self._local.factory is None:
                self._note_unknown(outputs)
            return outputs
        if on_device and not any(t.is_meta for _, _, _, t in given):
            self._run(shape, given, kinds, args, kwargs, outputs)
        else:
            self._on_host(shape, given, kinds, outputs)
        return outputs

    def _run(
        self,
        shape: Shape,
        given: list[tuple[str, bool, bool, Tensor]],
        kinds: dict[int, Kind],
        args: Any,
        kwargs: Any,
        outputs: Any,
    ) -> None:
        """Run an operator on the device if it uses or creates a device tensor."""
        line = self._device.current_stream().line
        is_index = shape.packet in _INDEXING
        must_wait = False
        accesses = []
        for name, reads, writes, tensor in given:
            kind = kinds[id(tensor)]
            if kind is Kind.DATA and tensor.dim() == 0 and shape.takes_scalars and not writes:
                continue  # an argument of the kernel
            if kind in (Kind.UNKNOWN, Kind.DATA):
                # Numbers come by a copy from memory that is not pinned.
                must_wait = must_wait or kind is Kind.DATA
                self._tracker.adopt(tensor, line, shape.name)
            elif kind is not Kind.DEVICE and (reads or writes):
                if shape.packet in _BRINGING.get(name, ()) and not writes:
                    # They are brought to the device; a number for masked places is an argument.
                    must_wait = must_wait or not (name == "values" and _is_masked(args))
                elif tensor.dim() or writes or not shape.takes_scalars:
                    self._tracker.misplaced(
                        shape.name,
                        f"expected {name} on the device, as its other tensors are, got one of "
                        f"shape {tuple(tensor.shape)} on the host; bring it",
                    )
                self._device.host_uses(shape.name, tensor, is_write=writes)
                continue
            if reads or writes:
                accesses.append(Access(tensor, writes))
            if is_index and name == "indices" and tensor.dtype in (torch.bool, torch.uint8):
                must_wait = must_wait or not _fills(shape, args)
        if not shape.is_empty:
            self._tracker.work(line, shape.name, accesses)
        self._claim(outputs, given, Kind.DEVICE, shape)
        if must_wait or _reads_values(shape, kwargs):
            self._device.waits(shape.name, line.clock)

    def _on_host(
        self,
        shape: Shape,
        given: list[tuple[str, bool, bool, Tensor]],
        kinds: dict[int, Kind],
        outputs: Any,
    ) -> None:
        found = set(kinds.values())
        if Kind.PINNED in found:
            for _, reads, writes, tensor in given:
                if reads or writes:
                    self._device.host_uses(shape.name, tensor, is_write=writes)
        if Kind.ELSEWHERE in found:
            self._claim(outputs, given, Kind.ELSEWHERE, shape)
        elif self._local.factory is None and found <= {Kind.UNKNOWN, Kind.DATA}:
            kind = Kind.DATA if Kind.DATA in found else Kind.UNKNOWN
            self._claim(outputs, given, kind, shape)

    def _claim(self, outputs: Any, given: Any, kind: Kind, shape: Shape) -> None:
        """Register the new tensors among the outputs."""
        old = {id(storage_of(part)) for *_, t in given for part in parts_of(t)}
        for tensor in tensors_in(outputs):
            if all(
                self._tracker.memory_of(part) is None and id(storage_of(part)) not in old
                for part in parts_of(tensor)
            ):
                line = self._device.current_stream().line
                self._tracker.mark(tensor, kind, line, shape.name)

    def _note_unknown(self, outputs: Any) -> None:
        for tensor in tensors_in(outputs):
            if self._tracker.memory_of(tensor) is None:
                is_argument = self._local.is_number and not tensor.dim()
                self._tracker.mark(tensor, Kind.UNKNOWN if is_argument else Kind.DATA)

    def _copy(self, func: Any, shape: Shape, args: Any, kwargs: Any) -> Any:
        """Copy between host and device, or within one of them."""
        move, tracker, device = self._local.move, self._tracker, self._device
        if shape.packet is aten.copy_:
            target, source = args[0], args[1]
            late = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            to, of = tracker.kind_of(target), tracker.kind_of(source)
            func(*args, **kwargs)
            result = target
        else:
            source, of = args[0], tracker.kind_of(args[0])
            if move is not None:
                to, late = move
            elif _has_index(kwargs.get("device")):
                to, late = Kind.DEVICE, bool(kwargs.get("non_blocking"))
            else:
                to, late = of, False
            self._local.move = None
            result = target = func(*args, **kwargs)
            if target.is_meta or source.is_meta:
                return result
            # Copies from host to host are the business of any thread, whatever device it is on.
            own = device.current_stream().line if to is Kind.DEVICE else None
            tracker.mark(target, to, own, shape.name)
        of = to if of is Kind.UNKNOWN else Kind.HOST if of is Kind.DATA else of
        to = Kind.HOST if to is Kind.DATA else to
        if to is Kind.UNKNOWN:
            if of is Kind.DEVICE:
                tracker.adopt(target, device.current_stream().line, shape.name)
            to = of
        if Kind.DEVICE not in (to, of):
            device.host_uses(shape.name, source, is_write=False)
            device.host_uses(shape.name, target, is_write=True)
            return result
        if of is Kind.HOST and source.dim() == 0 and target.dim():
            of = Kind.UNKNOWN  # `x[...] = number` fills
        if of is Kind.PINNED and not late:
            device.host_uses(shape.name, source, is_write=False)
        line = device.current_stream().line
        tracker.work(line, shape.name, [Access(source, False), Access(target, True)])
        is_between = of in (Kind.HOST, Kind.PINNED) or to in (Kind.HOST, Kind.PINNED)
        # Plain memory of the host is copied aside at once on its way in, and waited for on its way
        # out; only pinned memory is copied from and to while the host goes on.
        if is_between and (not late or to is Kind.HOST):
            device.waits(
                f"{shape.name} to the {'device' if to is Kind.DEVICE else 'host'}", line.clock
            )
        return result


def _named(shape: Shape, args: Any, kwargs: Any) -> Iterator[tuple[str, bool, bool, Tensor]]:
    for (name, reads, writes), value in zip(shape.arguments, args, strict=False):
        for tensor in tensors_in(value):
            yield name, reads, writes, tensor
    if kwargs:
        for name, reads, writes in shape.arguments[len(args) :]:
            if name in kwargs:
                for tensor in tensors_in(kwargs[name]):
                    yield name, reads, writes, tensor


def _has_index(device: Any) -> bool:
    return device is not None and device.type == "cpu" and device.index is not None


def _reads_values(shape: Shape, kwargs: Any) -> bool:
    if shape.packet is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    return shape.packet in READS


def _is_masked(args: Any) -> bool:
    """Return whether an indexed assignment uses masks instead of integers."""
    indices = [index for index in args[1] if index is not None]
    return all(index.dtype in (torch.bool, torch.uint8) for index in indices)


def _fills(shape: Shape, args: Any) -> bool:
    """Return whether a masked assignment writes a scalar, which needs no count of elements."""
    return shape.packet is not aten.index and len(args) > 2 and args[2].numel() == 1
