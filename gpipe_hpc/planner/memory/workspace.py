"""Temporary memory of layers while they run, in addition to what is kept for the backward.

For a forward these are tensors freed before it ends; for a backward, gradients passing through the
layer and a weight gradient before it is accumulated. Memory used inside one kernel or by libraries
is not included.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipe_hpc.engine import accumulate_gradients, edge_of
from gpipe_hpc.pytree import tensors_of
from gpipe_hpc.torch_compat import TorchDispatchMode, pytree


class Workspace(NamedTuple):
    """Peak temporary bytes of a layer, above the live bytes at the end of its forward.

    `backward`: above the live bytes at the start of the backward. It includes the gradient of the
    input, but not that of the output.
    """

    forward: int = 0
    backward: int = 0


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the live bytes of storages created by operations in its block.

    Storages that existed before the block are not counted.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.now = self.most = 0
        self._counted: set[int] = set()
        self._older: dict[int, torch.UntypedStorage] = {}  # kept alive: keys are not reused

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation and count the storages that it creates."""
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
        """Yield a function that returns the peak of live bytes above the value at the start."""
        self.most = before = self.now
        with self:
            yield lambda: self.most - before


def _storages(nest: Any) -> Iterator[torch.UntypedStorage]:
    return (each.untyped_storage() for each in pytree.tree_leaves(nest) if isinstance(each, Tensor))


def run_counting(forward: Callable[[], Any], weights: Iterable[Tensor]) -> Workspace:
    """Run a forward and its backward; return the peak temporary bytes of each.

    Weights already have gradients, as in all but the first backward of a step.
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
    # A stage releases sent outputs; they stay alive only if autograd has saved them.
    del results, ends
    with live.above() as most:
        accumulate_gradients(edges, seeds)
        return Workspace(of_forward, most())
