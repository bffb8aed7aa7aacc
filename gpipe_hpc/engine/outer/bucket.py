"""A bucket: gradients in one flat buffer, summed over the copies of their stage."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from gpipe_hpc.comm.group import Pending
from gpipe_hpc.engine.outer.division import starts_of
from gpipe_hpc.engine.outer.items import Item
from gpipe_hpc.engine.outer.ways import Way
from gpipe_hpc.engine.sums.dividing import Divisor
from gpipe_hpc.errors import ModelError


class Room(NamedTuple):
    """Memory for gradients: a flat buffer, and the part of it that is each parameter's."""

    flat: torch.Tensor
    parts: Sequence[torch.Tensor]

    @classmethod
    def for_all(cls, parameters: Sequence[nn.Parameter]) -> "Room":
        """Make room for the gradients of parameters of one kind, one behind the other."""
        kinds = {(p.dtype, p.device) for p in parameters}
        assert len(kinds) == 1, f"a bucket is of one kind, got {kinds}"
        sizes = [p.numel() for p in parameters]
        first = parameters[0]
        *starts, end = starts_of(sizes)
        flat = torch.zeros(end, dtype=first.dtype, device=first.device)
        return cls(flat, [flat[at : at + size] for at, size in zip(starts, sizes, strict=True)])


class Bucket:
    """The gradients of parameters of one dtype, one behind the other in one flat buffer.

    Autograd accumulates into views of it in place. Each view has a version counter of its own,
    which tells whether a micro-batch has used the parameter: no hook runs for that.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], room: Room | None = None) -> None:
        self._names, self.parameters = list(named), list(named.values())
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._flat, self._parts = room or Room.for_all(self.parameters)
        self._views: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._taken: list[int] = []
        self._used: list[bool] = []
        self._pending: Pending | None = None

    def clear(self) -> None:
        """Set all gradients to zero and hand the views to the parameters.

        Raises ModelError for a parameter that is not what it was when the bucket was made.
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
                raise _other_kind(name, parameter, view) from error

    def own(self) -> None:
        """Do nothing: the memory is the bucket's."""

    def used(self) -> list[bool]:
        """Say of each parameter whether a micro-batch of this replica had used it at the start."""
        return self._used

    def start_reduction(self, way: Way | None) -> Pending | None:
        """Start summing the buffer over the copies; None: there is no other.

        The last gradient of each of its parameters has come. Returns what is under way.
        """
        self.take_in()
        self._pending = None if way is None else way.start(self._flat, self._items())
        return self._pending

    def take_in(self) -> None:
        """Note which parameters were used, and take in what hooks have put elsewhere."""
        triples = zip(self.parameters, self._views, self._versions, strict=True)
        self._used = [
            p.grad is not None and (p.grad is not view or view._version != old)
            for p, view, old in triples
        ]
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()  # a hook of the user's took the gradient away
            elif parameter.grad is not view:
                view.copy_(parameter.grad)  # a hook of the user's put another tensor there
            parameter.grad = view
        self._taken = [view._version for view in self._views]

    def late(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients have changed since they were taken in.

        However it came about: what is added then may be in the sum, or in the half of it.
        """
        rows = zip(self.parameters, self._views, self._taken, strict=True)
        return [p for p, view, old in rows if p.grad is not view or view._version != old]

    def _items(self) -> tuple[Item, ...]:
        """Say what lies in the buffer."""
        begin = int(self._flat.storage_offset())
        starts = [int(part.storage_offset()) - begin for part in self._parts]
        rows = zip(self._names, self.parameters, starts, self._used, strict=True)
        return tuple(Item(n, p.shape, at, at + p.numel(), used) for n, p, at, used in rows)

    def wait(self) -> None:
        """Return when the sum is there; on an accelerator, when the current stream may use it."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def finish(self, divisor: Divisor, used: Sequence[bool]) -> None:
        """Wait for the sum, divide it, and leave None where no replica used the parameter."""
        self.wait()
        divisor.divide([self._flat])
        for parameter, view, is_used in zip(self.parameters, self._views, used, strict=True):
            parameter.grad = view if is_used else None


def _other_kind(name: str, parameter: nn.Parameter, view: torch.Tensor) -> ModelError:
    before, now = _kind(view), _kind(parameter)
    return ModelError(
        f"{name}: expected {before}, as when the pipeline was made, got {now}; make the layers so "
        f"before Pipeline is made, or copy into the parameter, as p.data.copy_(...)"
    )


def _kind(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} on {tensor.device}"
