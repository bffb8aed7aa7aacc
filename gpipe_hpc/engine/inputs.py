"""What layers are given: on the right device, and never written to.

An input may be needed for a recomputation, and its storage may belong to the user or to another
rank. So layers that write in place get copies. The first run of some layers is given copies anyway,
and shows whether they write.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpipe_hpc.comm.transport.aliases import cloned, is_buffer, is_plain, mark_buffer, shared_blocks
from gpipe_hpc.device.device import Device
from gpipe_hpc.engine.stages.routes import State
from gpipe_hpc.errors import GpipeError, ModelError
from gpipe_hpc.pytree import Nest, flatten, tensors_of, unflatten


class InputGuard:
    """Keeps consecutive layers from writing into what they are given.

    `where`: their name in messages. `first`: the index of the first one.
    """

    def __init__(self, where: str, first: int) -> None:
        self._where, self._first = where, first
        # By training mode (dropout writes in place in one only): whether the layers were seen
        # to leave their input as it is.
        self._leaves_alone: dict[bool, bool] = {}

    def protect(
        self, given: State, *, has_graph: bool, is_training: bool
    ) -> tuple[Nest, dict[str, Nest], "InputWatch"]:
        """Return what the layers may run on in place of `given`, and what notices their writes.

        `given` stays as it is: it may be needed for recomputation, and its storage may belong to
        the user or to another rank. So its tensors are copied if layers write into them; the first
        run finds out. Its containers are always made again: a layer may put other values into a
        dict or list.
        """
        is_known = self._leaves_alone.get(is_training)
        nest = given.nest
        if is_known and isinstance(nest, torch.Tensor) and not given.stashed:
            is_leaf = has_graph and nest.requires_grad and nest.is_leaf
            if is_leaf and nest.layout is torch.strided and not nest.is_nested:
                nest = nest.view_as(nest)  # as `_with_node` does
            versions = [given.nest._version]
            return nest, {}, InputWatch(is_training, [given.nest], versions, is_copy=False)
        leaves, tree = flatten(given)
        tensors = given.tensors()
        if is_known:
            # A `grad_fn` for each that requires a gradient: layers put hooks on that.
            own = {id(t): _with_node(t) if has_graph else t for t in tensors}
            watch = InputWatch(is_training, tensors, [t._version for t in tensors], is_copy=False)
        else:
            copies = cloned(tensors)
            own = {id(tensor): copy for tensor, copy in zip(tensors, copies, strict=True)}
            buffers = [place for place, tensor in enumerate(tensors) if is_buffer(tensor)]
            for place in buffers:
                mark_buffer(copies[place])  # layers may hand it on
            versions = [copy._version for copy in copies]
            watch = InputWatch(is_training, copies, versions, buffers, tensors, is_copy=True)
        state = unflatten([own.get(id(leaf), leaf) for leaf in leaves], tree)
        return state.nest, state.stashed, watch

    def refuse_writes(self, watch: "InputWatch") -> None:
        """Raise ModelError if the layers wrote into what they were given, and it was no copy.

        Their first run was given copies, and shows whether they write.
        """
        if watch.is_copy and watch.tensors:
            if watch.is_training not in self._leaves_alone:
                writes = bool(watch.written()) or watch.has_other_values()
                self._leaves_alone[watch.is_training] = not writes
            return
        for tensor, version in zip(watch.tensors, watch.versions, strict=True):
            if tensor._version != version:
                raise ModelError(
                    f"{self._where}: a layer wrote in place into the "
                    f"stage's input in this micro-batch, but not in the first; use inplace=False "
                    f"there, or write in place always"
                )

    def refuse_shared(self, watch: "InputWatch", layer: str) -> None:
        """Raise ModelError if `layer` has written into what others hold, too.

        Into one of several views of one memory, or into the buffer of a layer.
        """
        first, written = self._first, watch.written()
        source = f"output of layers.{first - 1}" if first else "batch"
        for place in watch.buffers:
            if place in written:
                raise ModelError(
                    f"{layer}: wrote in place into tensor {place} of the {source}, which "
                    f"lies in a buffer or a frozen parameter of an earlier layer; a write does not "
                    f"reach that layer if the model is cut between the two. Use inplace=False "
                    f"here, or let the earlier layer return a copy (clone)"
                )
        for block in shared_blocks(watch.tensors):
            for place in written & block.views.keys():
                others = ", ".join(str(other) for other in block.views if other != place)
                raise ModelError(
                    f"{layer}: wrote in place into tensor {place} of the {source}, which "
                    f"shares memory with tensor {others} of it; the write would reach only one of "
                    f"them where the model is cut in between. Use inplace=False there, or let the "
                    f"layer before return tensors of their own (clone)"
                )


class InputWatch:
    """The tensors that layers were given, and how often each had been written to before.

    `buffers`: positions of those that lie in a buffer of another layer. `originals`: of copies.
    `shares_memory`: copies of such ones, or of different tensors that have elements in common.
    """

    __slots__ = (
        "buffers",
        "is_copy",
        "is_training",
        "originals",
        "shares_memory",
        "tensors",
        "versions",
    )

    def __init__(
        self,
        is_training: bool,
        tensors: Sequence[torch.Tensor],
        versions: Sequence[int],
        buffers: Sequence[int] = (),
        originals: Sequence[torch.Tensor] = (),
        *,
        is_copy: bool,
    ) -> None:
        self.is_training, self.tensors, self.versions = is_training, tensors, versions
        self.buffers, self.originals, self.is_copy = buffers, originals, is_copy
        self.shares_memory = is_copy and (
            bool(buffers) or (len(tensors) > 1 and bool(shared_blocks(tensors)))
        )

    def written(self) -> set[int]:
        """Return the positions of those that were written to since."""
        pairs = zip(self.tensors, self.versions, strict=True)
        return {place for place, (tensor, v) in enumerate(pairs) if tensor._version != v}

    def has_other_values(self) -> bool:
        """Return whether the copies differ from their originals.

        Writes by `.data` or NumPy change no version, so values are compared.
        """
        with torch.no_grad():
            return any(
                type(copy) is torch.Tensor and is_plain(copy) and not _are_equal(copy, original)
                for copy, original in zip(self.tensors, self.originals, strict=True)
            )


def refuse_astray(
    nest: Nest, device: Device, where: str, remedy: str, error: type[GpipeError]
) -> None:
    """Raise `error` where a tensor of a nest lies neither on a rank's device nor on the host.

    What was queued for one device knows nothing of another's streams, and its kernels do not reach
    the other's memory: torch would say so somewhere later, or copy without a word.
    """
    for tensor in tensors_of(nest):
        if device.is_astray(tensor):
            raise error(
                f"{where}: expected tensors on {device.torch}, where this rank computes, or on the "
                f"host, got one of shape {_shape(tensor)} on {tensor.device}; {remedy}"
            )


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _with_node(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a `grad_fn` if it requires a gradient: layers put hooks on that."""
    has_none = tensor.requires_grad and tensor.is_leaf and is_plain(tensor)
    return tensor.view_as(tensor) if has_none else tensor
