"""Buffers that forwards change: once per micro-batch, also with recomputation.

In training each forward works on copies of buffers that are known to change, and of small ones,
which may begin to. The copies replace the originals in the modules. So tensors that the graph of
one micro-batch has saved stay unchanged while the next one runs, and the values before a forward
are kept for its R, which works on a copy of them and discards it. Within a step nothing is written
back into an original, as autograd would detect the write. At the end of a step the originals get
the newest values and are put back into the modules.

Each forward shows which buffers change: the module has another tensor, or its version has changed,
or its values have (by a write through `.data`). An unchanged copy is replaced by the original at
once. A large buffer that changes for the first time after forwards that did not change it raises
ModelError, if other micro-batches need its earlier value.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn

from gpipe_hpc.comm.transport.aliases import storages_of
from gpipe_hpc.device.device import on_host
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import PooledBatchNorm
from gpipe_hpc.pytree import Nest, tensors_of

Home = dict[str, torch.Tensor | None]
"""The buffers of one module by name: the dict `module._buffers` itself."""

Place = tuple[int, str]
"""The number of a module's dict among a layer's dicts, and a buffer's name in it."""

SMALL_BYTES: Final = 64 * 1024
"""Size above which a buffer is copied only in the first step, and once it is known to change."""


_NUM_LOOKED: Final = 3  # steps
_FEW_BYTES: Final = 4096  # up to so many `torch.equal` is faster than a comparison of bytes


class FoundBuffer(NamedTuple):
    """A buffer before a forward, with its version, and the copy that replaced it, if any."""

    place: Place
    tensor: torch.Tensor
    version: int
    stand_in: torch.Tensor | None


class BuffersBefore(NamedTuple):
    """The buffers of a layer before one of its forwards, and which of them the forward changed.

    Args:
        homes: Copies of the modules' buffer dicts.
        found: The buffers in them.
        moved: The buffers that the forward changed.
        lasting: The originals that the stage's `PersistentBuffers` had stored.
    """

    homes: tuple[Home, ...]
    found: tuple[FoundBuffer, ...]
    moved: frozenset[Place] = frozenset()
    lasting: Mapping[tuple[int, str], tuple[Home, torch.Tensor]] = MappingProxyType({})


NO_BUFFERS: Final = BuffersBefore((), ())


class ReturnedBuffer(NamedTuple):
    """A buffer whose memory the output of a layer uses, with its version at that time.

    Args:
        where: The name of the layer.
        name: The name of the buffer.
        tensor: The buffer, or the copy that replaced it.
        version: Its version after the layer has run.
        is_apart: Whether a later write would be lost, or would change a recomputation.
    """

    where: str
    name: str
    tensor: torch.Tensor
    version: int
    is_apart: bool

    def refuse_writes(self) -> None:
        """Raise ModelError if another layer has written to the buffer since."""
        if self.is_apart and version_of(self.tensor) != self.version:
            raise ModelError(
                f"{self.where}: returned its buffer {self.name}, and a later layer wrote to it in "
                f"place; a layer may change only its own buffers, as each micro-batch has a copy "
                f"of them. Return a copy, self.{self.name}.clone(), or change the buffer in this "
                f"layer"
            )


class PersistentBuffers:
    """The original buffer tensors of a stage while copies replace them during a step."""

    def __init__(self) -> None:
        self.num_steps = 0  # that have ended
        self._tensors: dict[tuple[int, str], tuple[Home, torch.Tensor]] = {}
        self._earlier: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, home: Home, name: str, tensor: torch.Tensor) -> None:
        """Store the original tensor of a buffer; only the first call in a step has an effect."""
        self._tensors.setdefault((id(home), name), (home, tensor))

    def remember(self, tensor: torch.Tensor, version: int, value: torch.Tensor) -> None:
        """Store the value of a tensor at an earlier version, until the step ends."""
        self._earlier[id(tensor), version] = tensor, value

    def forget(self, home: Home, name: str) -> None:
        """Forget the original of a buffer that the layer has replaced by another tensor."""
        self._tensors.pop((id(home), name), None)

    def recall(self, tensor: torch.Tensor, version: int) -> torch.Tensor | None:
        """Return a tensor with the value of `tensor` at a version; None if it was not stored."""
        if (id(tensor), version) in self._earlier:
            return self._earlier[id(tensor), version][1]
        return tensor if version_of(tensor) == version else None

    def kept(self) -> dict[tuple[int, str], tuple[Home, torch.Tensor]]:
        """Return a copy of the stored originals, for `put_back`."""
        return dict(self._tensors)

    def put_back(self, kept: Mapping[tuple[int, str], tuple[Home, torch.Tensor]]) -> None:
        """Restore the stored originals to those before a forward that is undone."""
        self._tensors = dict(kept)

    def settle(self) -> None:
        """End a step: put the original tensors back into the modules, with the newest values."""
        for (_, name), (home, tensor) in self._tensors.items():
            newest = home.get(name)
            if newest is None or newest is tensor or _kind(newest) != _kind(tensor):
                continue  # the layer has removed it, or changed its kind: as in plain torch
            with torch.no_grad():
                tensor.copy_(newest)
            home[name] = tensor
        self._tensors, self._earlier = {}, {}
        self.num_steps += 1


class LayerBuffers:
    """The buffers of one layer and of its submodules.

    Statistics of pooled BatchNorm layers are left out, as no forward changes them.

    Args:
        layer: The layer.
        where: Its name in messages.
        lasting: The original buffers of its stage.
        sharing: Buffer dicts of other layers of the stage that contain one of the same tensors.
        elsewhere: Buffers by name that a layer of another stage, given by its index, shares;
            forwards must not change these.
    """

    def __init__(
        self,
        layer: nn.Module,
        where: str,
        lasting: PersistentBuffers,
        sharing: Iterable[tuple[str, Home]] = (),
        elsewhere: Mapping[str, int] | None = None,
    ) -> None:
        self._where, self._elsewhere = where, elsewhere or {}
        self._layer = layer
        self._lasting = lasting
        named = [*buffer_dicts_of(layer), *sharing]
        self._prefixes = [prefix for prefix, _ in named]
        self.homes = [home for _, home in named]
        self._moving: set[Place] = set()
        self._silent: set[Place] = set()  # those of `_moving` whose versions stay the same
        self._last_step: int | None = None  # in which it ran
        self._at_hand: dict[Place, torch.Tensor] = {}

    @property
    def exist(self) -> bool:
        """Return whether the layer has any buffers."""
        return any(self.homes)

    def begin(self) -> BuffersBefore:
        """Store the buffers before a training forward, and replace those that change by copies."""
        if not any(self.homes):
            return NO_BUFFERS
        homes = tuple(map(dict, self.homes))
        if self._lasting.num_steps == 0:
            large = (each for each in self._found() if not self._copies(each))
            self._at_hand = {each.place: _copy(each.tensor) for each in large}
        return BuffersBefore(homes, tuple(self._put_copies()), lasting=self._lasting.kept())

    def end(self, before: BuffersBefore, *, returns: bool) -> BuffersBefore:
        """Detect the buffers that the forward changed; return `before` with them.

        Raises ModelError if a value was overwritten that another micro-batch needs.
        """
        if before is not NO_BUFFERS or any(self.homes):
            before = before._replace(moved=self._end(before, returns))
        self._last_step, self._at_hand = self._lasting.num_steps, {}
        return before

    def can_restore(self, before: BuffersBefore) -> bool:
        """Return whether `restore` can undo a forward; `before` comes from `end`."""
        return not any(f.stand_in is None and f.place in before.moved for f in before.found)

    def restore(self, before: BuffersBefore) -> None:
        """Undo a forward by discarding the copies that it wrote to."""
        if before.homes:
            self._settle_in(before.homes)
            self._lasting.put_back(before.lasting)

    def returned(
        self, before: BuffersBefore, output: Nest, *, returns: bool
    ) -> list[ReturnedBuffer]:
        """Return the buffers whose memory an output uses, after `end`; in the first steps only."""
        if not before.found or self._lasting.num_steps >= _NUM_LOOKED:
            return []
        storages = storages_of(tensors_of(output))
        found: list[ReturnedBuffer] = []
        for place, tensor, _, stand_in in before.found:
            used = tensor if stand_in is None else stand_in
            if used.nbytes and not storages.isdisjoint(storages_of((used,))):
                is_apart = place not in before.moved and (returns or stand_in is not None)
                name = self._names({place})
                found.append(ReturnedBuffer(self._where, name, used, version_of(used), is_apart))
        return found

    @contextmanager
    def again(self, before: BuffersBefore) -> Iterator[None]:
        """Run the block with the buffers of an earlier forward, then restore the present ones.

        Raises ModelError if the earlier value of a buffer was overwritten, or if the block changes
        a buffer that the forward did not change.
        """
        now = tuple(map(dict, self.homes))
        start = self._start(before)
        try:
            self._settle_in(start)
            found = self._found()
            yield
            changed = self._changed(found) - before.moved
        finally:
            self._settle_in(now)
        if changed:
            raise ModelError(
                f"{self._where}: recomputation changed buffer {self._names(changed)}, which the "
                f"forward had not changed; let the change depend on buffers and inputs only, not "
                f"on whether gradients are enabled, or use recompute=never"
            )

    @property
    def move(self) -> bool:
        """Return whether any buffer is known to change in forwards."""
        return bool(self._moving)

    def moving(self) -> list[FoundBuffer]:
        """Return the present state of the buffers that are known to change."""
        return [each for each in self._found() if each.place in self._moving]

    def changes(self, found: Sequence[FoundBuffer]) -> str:
        """Return the names of buffers that have changed since `found`; empty if none has."""
        return self._names({e.place for e in found} & self._changed(found)) if found else ""

    def _found(self) -> list[FoundBuffer]:
        return [
            FoundBuffer((number, name), tensor, version_of(tensor), None)
            for number, home in enumerate(self.homes)
            for name, tensor in home.items()
            if tensor is not None
        ]

    def _copies(self, found: FoundBuffer) -> bool:
        return found.place in self._moving or found.tensor.nbytes <= SMALL_BYTES

    def _put_copies(self) -> list[FoundBuffer]:
        copies: dict[int, torch.Tensor] = {}
        noted: list[FoundBuffer] = []
        for each in self._found():
            if self._copies(each):
                (number, name), tensor, version, _ = each
                stand_in = copies.get(id(tensor))
                if stand_in is None:
                    stand_in = copies[id(tensor)] = _copy(tensor)
                self.homes[number][name] = stand_in
                each = FoundBuffer(each.place, tensor, version, stand_in)
            noted.append(each)
        return noted

    def _end(self, before: BuffersBefore, returns: bool) -> frozenset[Place]:
        """Return the places of buffers that the forward changed, and store that they change."""
        moved = self._changed(before.found)
        for each in before.found:
            place = number, name = each.place
            home, original = self.homes[number], each.stand_in is None
            if each.stand_in is not None and version_of(each.tensor) != each.version:
                raise self._held_twice(place)
            if home.get(name) is not (each.tensor if original else each.stand_in):
                self._lasting.forget(home, name)
                continue
            if place not in moved and self._has_silently_moved(each):
                moved.add(place)
                self._silent.add(place)
            if place in moved:
                if place not in self._moving and self._is_held_elsewhere(each.tensor):
                    raise self._held_twice(place)
                if original:
                    self._save_earlier(each, returns)
                self._lasting.keep(home, name, each.tensor)
            elif not original:
                home[name] = each.tensor
        if self._elsewhere:
            self._refuse_elsewhere(moved - self._moving)
        self._moving |= moved
        return frozenset(moved)

    def _refuse_elsewhere(self, moved: set[Place]) -> None:
        for place in sorted(moved):
            name = self._names({place})
            other = self._elsewhere.get(name)
            if other is not None:
                raise ModelError(
                    f"{self._where}: buffer {name} is changed in a forward and is also a buffer of "
                    f"layers.{other}, which is on another stage and would not see the change; give "
                    f"each layer a module of its own (weights may be tied), or put both layers "
                    f"into one stage (partition=...)"
                )

    def _has_silently_moved(self, each: FoundBuffer) -> bool:
        """Return whether a buffer was written to without a change of its version (by `.data`)."""
        if each.place in self._silent:
            return True
        if each.stand_in is None:
            earlier = self._at_hand.get(each.place)
            return earlier is not None and not _is_same(earlier, each.tensor)
        # After the first step the host does not wait for a device to compare values.
        is_asked = on_host(each.tensor) or self._lasting.num_steps == 0
        return is_asked and not _is_same(each.stand_in, each.tensor)

    def _save_earlier(self, each: FoundBuffer, returns: bool) -> None:
        """Store the earlier value of a buffer; ModelError if it is lost and still needed."""
        number, name = each.place
        if each.place in self._at_hand:
            self._lasting.remember(each.tensor, each.version, self._at_hand[each.place])
        elif returns or self._last_step == self._lasting.num_steps:
            raise self._lost(each.place, each.tensor)
        if each.place in self._silent:  # a copy, as version and tensor do not show the change
            self.homes[number][name] = _copy(each.tensor)

    def _changed(self, found: Sequence[FoundBuffer]) -> set[Place]:
        """Return the places whose tensor was replaced or written to since `found`."""
        changed: set[Place] = set()
        homes = self.homes
        num_gone = 0
        for place, tensor, version, stand_in in found:
            now = homes[place[0]].get(place[1])
            num_gone += now is None
            expected = (tensor, version) if stand_in is None else (stand_in, 0)
            if now is not expected[0] or version_of(now) != expected[1]:
                changed.add(place)
        if num_gone or sum(map(len, homes)) != len(found):  # there may be new buffers
            changed |= {each.place for each in self._found()} - {each.place for each in found}
        return changed

    def _start(self, before: BuffersBefore) -> Sequence[Home]:
        """Return the buffer dicts with which a forward is run again."""
        homes = [dict(home) for home in before.homes] or [{} for _ in self.homes]
        copies: dict[int, torch.Tensor] = {}
        for place, tensor, version, _ in before.found:
            number, name = place
            if place not in self._moving and version_of(tensor) == version:
                continue
            if id(tensor) not in copies:
                value = self._lasting.recall(tensor, version)
                if value is None:
                    raise self._lost(place, tensor)
                copies[id(tensor)] = _copy(value)
            homes[number][name] = copies[id(tensor)]
        return homes

    def _settle_in(self, homes: Sequence[Home]) -> None:
        for home, wanted in zip(self.homes, homes, strict=True):
            home.clear()
            home.update(wanted)

    def _is_held_elsewhere(self, buffer: torch.Tensor) -> bool:
        """Return whether an attribute of the layer or of a submodule shares a buffer's memory."""
        memory = buffer.untyped_storage().data_ptr()
        return any(
            value.untyped_storage().data_ptr() == memory
            for module in self._layer.modules()
            for value in vars(module).values()
            if memory and isinstance(value, torch.Tensor) and value.layout is torch.strided
        )

    def _held_twice(self, place: Place) -> ModelError:
        name = self._names({place})
        return ModelError(
            f"{self._where}: buffer {name} is changed in a forward and shares memory with an "
            f"attribute or a view, which would not see the change, because each micro-batch has "
            f"its own copy of the buffer; use self.{name.rsplit('.', 1)[-1]} itself in every "
            f"forward"
        )

    def _lost(self, place: Place, tensor: torch.Tensor) -> ModelError:
        return ModelError(
            f"{self._where}: a forward changed buffer {self._names({place})}, which earlier "
            f"forwards had not changed. Other micro-batches still need the old value, but only "
            f"buffers of at most {SMALL_BYTES} bytes are copied in advance, and this one has "
            f"{tensor.nbytes}; change it in the first forward too, for example by add_(0)"
        )

    def _names(self, places: Iterable[Place]) -> str:
        return ", ".join(f"{self._prefixes[number]}{name}" for number, name in sorted(places))


def buffer_dicts_of(layer: nn.Module) -> list[tuple[str, Home]]:
    """Return the buffer dicts of a layer's modules, each with the prefix of its names."""
    return [
        (f"{name}." if name else "", module._buffers)
        for name, module in layer.named_modules()
        if not isinstance(module, PooledBatchNorm)
    ]


def version_of(tensor: torch.Tensor) -> int:
    """Return a tensor's version, which grows with each write in place; 0 in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad else copy


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have equal values; on the host, equal bytes, NaNs included."""
    if one.dtype != other.dtype or one.device != other.device:
        return False
    if one.nbytes <= _FEW_BYTES and torch.equal(one, other):
        return True
    if one.shape != other.shape or not (_is_plain(one) and _is_plain(other)):
        return torch.equal(one, other)
    return bool(np.array_equal(_bytes_of(one), _bytes_of(other)))


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a contiguous array in host memory."""
    return (
        type(tensor) is torch.Tensor
        and on_host(tensor)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
