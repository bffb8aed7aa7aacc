"""What layers take while they run, beside what they keep from forward to backward.

Of a forward that is what it drops again before it ends. Of a backward: gradients on their way
through the layer, and a weight's gradient ahead of its sum with those of earlier micro-batches.
What kernels take within one operator is not seen here, nor what libraries take for themselves.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipe_hpc.engine.backward.calls import accumulate_gradients, edge_of
from gpipe_hpc.pytree import tensors_of
from gpipe_hpc.torch_compat import TorchDispatchMode, pytree


class Workspace(NamedTuple):
    """Of a layer: the most bytes at once above what stands at the end of its forward.

    `backward`: above what stands at the start of its backward; the gradient of its input is part
    of it, that of its output, which comes from elsewhere, is not.
    """

    forward: int = 0
    backward: int = 0


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the storages that operators make within it, and that still live.

    A storage that an operator is first seen to read stood there before and is not counted.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.now = self.most = 0
        self._counted: set[int] = set()
        self._older: dict[int, torch.UntypedStorage] = {}  # held: no other may take its place

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator; count what it makes."""
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._counted:
                self._older[storage._cdata] = storage
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            key, nbytes = storage._cdata, storage.nbytes()
            if key not in self._counted and key not in self._older:
                self._counted.add(key)
                self.now += nbytes
                weakref.finalize(storage, self._drop, key, nbytes).atexit = False
        self.most = max(self.most, self.now)
        return result

    def _drop(self, key: int, nbytes: int) -> None:
        self._counted.discard(key)
        self.now -= nbytes

    @contextmanager
    def above(self) -> Iterator[Callable[[], int]]:
        """Return what tells the most bytes above those of now, as of the time it is asked."""
        self.most = before = self.now
        with self:
            yield lambda: self.most - before


def _storages(nest: Any) -> Iterator[torch.UntypedStorage]:
    return (each.untyped_storage() for each in pytree.tree_leaves(nest) if isinstance(each, Tensor))


def run_counting(forward: Callable[[], Any], weights: Iterable[Tensor]) -> Workspace:
    """Run a forward, and the backward of what it returns; return what they take on their way.

    The weights have gradients of earlier micro-batches, as in all backwards of a step but one.
    """
    for weight in weights:
        if weight.requires_grad:
            weight.grad = torch.empty_like(weight)
    live = LiveBytes()
    with live.above():
        results = forward()
    of_forward = live.most - live.now
    ends = [tensor for tensor in tensors_of(results) if tensor.requires_grad]
    if not ends:
        return Workspace(of_forward)
    seeds = [torch.empty_like(end) for end in ends]
    edges = [edge_of(end) for end in ends]
    # A stage lets go of what it has sent: outputs live on where autograd has saved them.
    del results, ends
    with live.above() as most:
        accumulate_gradients(edges, seeds)
        return Workspace(of_forward, most())
