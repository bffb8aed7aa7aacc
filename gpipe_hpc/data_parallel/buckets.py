"""Buckets: gradients of parameters of one dtype, summed over copies and divided at once.

    Bucket            all copies get the whole sum (DDP)
    ShardedBucket     each copy gets its shard of the sum, and owns that of the parameters (ZeRO)
    LocalGradients    no other copy: nothing to sum, no memory before the first backward

All three have the same methods, in the order of a step: `clear`, `start_reduction`, `wait`,
`finish`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from gpipe_hpc.comm.collectives.group import Group, Pending
from gpipe_hpc.comm.collectives.packed import PACK, packs
from gpipe_hpc.data_parallel.layout import BucketItem, FlatLayout, OwnedParameter
from gpipe_hpc.data_parallel.strategies import ReduceStrategy
from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.torch_compat import storage_use_count

_LOW: Final = (torch.bfloat16, torch.float16)
_SMALL: Final = 2**18  # elements: a kernel of its own takes no longer to start than to run
# References to the memory of a tensor that no other shares: the tensor, and the question itself.
_UNSHARED: Final = 2


class Divisor:
    """Divide gradients of any dtypes by one number: the same bits on every device, few kernels.

    Gradients are divided in their own precision, those of 16 bits in float32. A CPU does so by
    itself; an accelerator would round the divisor to 16 bits too, so they are widened there.

    Args:
        value: The number, float64[], on a device.
        device: Where gradients are.
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
            number = self.value if is_there else self._device.fetch(self.value)
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
            tensor.div_(divisor.view(1))  # which, unlike a scalar, makes the quotient wide


def by_kind(named: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, parameter in named.items():
        kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
    return list(kinds.values())


class Bucket:
    """Gradients of parameters of one dtype in one flat buffer, summed over the copies of a stage.

    Autograd accumulates into views of the buffer in place. Each view has a version counter of its
    own, which shows whether a micro-batch used the parameter, without a hook.

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
        self._pending: Pending | None = None

    def clear(self) -> None:
        """Set all gradients to zero and give the parameters their views as `.grad`.

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
        """Do nothing: the memory is the bucket's."""

    def used(self) -> list[bool]:
        """Return for each parameter whether this replica used it before the reduction started."""
        return self._used

    def start_reduction(self, strategy: ReduceStrategy | None) -> Pending | None:
        """Start summing the buffer over the copies; None if there is no other copy.

        Every parameter has its last gradient.
        """
        self.collect()
        self._pending = None if strategy is None else strategy(self._flat, self._items())
        return self._pending

    def collect(self) -> None:
        """Note which parameters were used, and copy gradients that hooks have replaced."""
        triples = zip(self.parameters, self._views, self._versions, strict=True)
        self._used = [
            p.grad is not None and (p.grad is not view or view._version != old)
            for p, view, old in triples
        ]
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()  # a hook of the user's removed the gradient
            elif parameter.grad is not view:
                view.copy_(parameter.grad)  # a hook of the user's replaced the gradient
            parameter.grad = view
        self._collected = [view._version for view in self._views]

    def late(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients changed after the reduction had started.

        What was added then may be missing from the sum.
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
    """Return zeros for the gradients of parameters of one kind, and the part of each."""
    kinds = {(p.dtype, p.device) for p in named.values()}
    assert len(kinds) == 1, f"a bucket is of one dtype and device, got {kinds}"
    dtype, device = kinds.pop()
    layout = FlatLayout({name: p.numel() for name, p in named.items()})
    flat = torch.zeros(layout.num_elements, dtype=dtype, device=device)
    return flat, [flat[at : at + layout.sizes[name]] for name, at in layout.offsets.items()]


def _changed_kind(name: str, parameter: nn.Parameter, view: Tensor) -> ModelError:
    before, now = _kind(view), _kind(parameter)
    return ModelError(
        f"{name}: expected {before}, as when the pipeline was made, got {now}; change the layers "
        f"before Pipeline is made, or copy into the parameter, as p.data.copy_(...)"
    )


def _kind(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} on {tensor.device}"


class ShardedBucket:
    """Parameters of one dtype and their gradients in two flat buffers, sharded over the copies.

    A reduce-scatter gives each copy its shard of the summed gradients. What an optimizer then
    updates, `owned`, the other copies get when the parameters are gathered. The parameters become
    views of the parameter buffer.

    Args:
        named: The parameters by global name, in the order of their memory.
        group: The copies of the stage.
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
        self._trained: list[str] = []
        self._bucket = Bucket({}, self._memory())
        self._used: dict[str, bool] = {}
        self._gathering: Pending | None = None

    def _memory(self) -> tuple[Tensor, list[Tensor]]:
        return self._gradients, [self._gradients[self._places[n]] for n in self._trained]

    @property
    def whole(self) -> list[nn.Parameter]:
        """Return the parameters whose shards these are."""
        return list(self._named.values())

    def check_memory(self) -> None:
        """Raise ConfigError for a parameter with other memory: updates would not reach it."""
        for name, parameter in self._named.items():
            # A parameter without elements has no memory to lose.
            if (
                parameter.numel()
                and parameter.data_ptr() != self._values[self._places[name]].data_ptr()
            ):
                raise ConfigError(
                    f"outer.shard=flat: expected the memory of {name} to be the buffer that its "
                    f"parts are gathered in, got other memory (p.data was set); copy into "
                    f"it instead, as p.data.copy_(...), or use outer.shard=none"
                )

    def begin(self) -> None:
        """Begin a step; parameters may have been frozen or unfrozen."""
        self.check_memory()
        trained = [name for name, p in self._named.items() if p.requires_grad]
        if trained != self._trained:
            self._trained = trained
            self._bucket = Bucket({name: self._named[name] for name in trained}, self._memory())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return those that are trained in this step."""
        return self._bucket.parameters

    def clear(self) -> None:
        """Set all gradients to zero and give the trained parameters their views as `.grad`."""
        self._bucket.clear()

    def unshare(self) -> None:
        """Do nothing: the memory is the bucket's."""

    def used(self) -> list[bool]:
        """Return for each trained parameter whether a micro-batch of this replica used it."""
        return self._bucket.used()

    def late(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients changed after the reduction had started."""
        return self._bucket.late()

    def start_reduction(self, strategy: ReduceStrategy | None) -> Pending | None:
        """Start summing: each copy gets its shard of the sum."""
        return self._bucket.start_reduction(strategy)

    def wait(self) -> None:
        """Wait for this copy's shard of the sum; whole gradients do not exist afterwards."""
        self._bucket.wait()
        for parameter in self._named.values():
            parameter.grad = None
        for name, owned in self.owned.items():
            owned.parameter.grad = self._gradients[self._owned_places[name]]

    def finish(self, divisor: Divisor, used: Sequence[bool]) -> None:
        """Wait for the shard of the sum, divide it, and give it to what an optimizer steps on."""
        self.wait()
        divisor.divide([self._gradients[self._shard]])
        self._used = dict(zip(self._trained, used, strict=True))
        for name, owned in self.owned.items():
            if not self._used.get(name, False):
                owned.parameter.grad = None

    def drop(self) -> None:
        """Discard the gradients of the step; all copies do so."""
        self._used = {}
        for owned in self.owned.values():
            owned.parameter.grad = None

    def gather_gradients(self) -> dict[str, Tensor | None]:
        """Return copies of the whole gradients; a collective call of all copies.

        None for a parameter that no replica used.
        """
        gathered = self._gradients.clone()
        for name, owned in self.owned.items():
            if owned.parameter.grad is not None:  # another tensor, if the user has replaced it
                gathered[self._owned_places[name]] = owned.parameter.grad
        self._group.start_all_gather(gathered).wait()
        return {
            name: gathered[at].view_as(self._named[name]) if self._used.get(name) else None
            for name, at in self._places.items()
        }

    def start_gathering(self) -> Pending:
        """Start gathering the parameters, each copy's shard from that copy.

        Twice a step if an optimizer's `step` calls that of its base class: torch runs the hooks of
        both.
        """
        self.wait_for_parameters()
        self._gathering = self._group.start_all_gather(self._values)
        return self._gathering

    def wait_for_parameters(self) -> None:
        """Wait for the parameters, if their gathering was started."""
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            gathering.wait()


class LocalGradients:
    """Gradients of parameters of one dtype that no other rank adds to.

    They take no memory before the first backward makes them: a schedule that keeps all
    micro-batches needs the most just before that.

    Args:
        parameters: Parameters of one dtype and device.
        device: Where the stage computes.
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
        """Copy gradients that the last backward made and whose memory is shared.

        Autograd may use what a backward function returns as it is. Its memory may also be that of
        another parameter's gradient, or of one that is sent to another stage: both terms of a sum
        get the same tensor. The next micro-batch adds in place.
        """
        come = [parameter for parameter in self._without if parameter.grad is not None]
        if not come:
            return
        self._without = [parameter for parameter in self._without if parameter.grad is None]
        dense = [p for p in come if p.grad is not None and not p.grad.is_sparse]
        shared = [p for p in dense if p.grad is not None and not _is_unshared(p.grad)]
        # A pack at a time: copies of all at once would double the memory of the gradients.
        for pack in packs(shared, PACK if self._is_accelerator else 1):
            _copy_gradients(pack)
        for parameter in come:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()  # as those of a bucket are

    def used(self) -> list[bool]:
        """Return for each parameter whether a micro-batch used it."""
        return [parameter.grad is not None for parameter in self.parameters]

    def late(self) -> list[nn.Parameter]:
        """Return nothing: there is no reduction that could have started too early."""
        return []

    def start_reduction(self, strategy: ReduceStrategy | None) -> Pending | None:
        """Check that there is nothing to sum."""
        assert strategy is None, "the stage's gradients are summed over other ranks"
        return None

    def wait(self) -> None:
        """Return at once: nothing is summed."""

    def finish(self, divisor: Divisor, used: Sequence[bool]) -> None:
        """Divide the gradients."""
        pairs = zip(self.parameters, used, strict=True)
        divisor.divide([p.grad for p, is_used in pairs if is_used and p.grad is not None])


def _is_unshared(gradient: Tensor) -> bool:
    """Return whether a tensor fills memory that torch allocated for it alone.

    A needless copy costs more than its time: malloc cannot reuse the many small blocks that are
    freed, so that on a CPU a stage's gradients would at times take their memory twice.
    """
    memory = gradient.untyped_storage()
    return (
        memory.nbytes() == gradient.nbytes
        and memory.resizable()  # else it belongs to an array, or to another library
        and storage_use_count(memory._cdata) == _UNSHARED
    )


def _copy_gradients(parameters: Iterable[Tensor]) -> None:
    """Give parameters copies of their gradients, by one kernel."""
    present = [(p, p.grad) for p in parameters if p.grad is not None]
    gradients = [gradient for _, gradient in present]
    copies = [torch.empty_like(gradient) for gradient in gradients]
    torch._foreach_copy_(copies, gradients)
    for (parameter, _), copy in zip(present, copies, strict=True):
        parameter.grad = copy
