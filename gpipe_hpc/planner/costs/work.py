"""Count operations by the resource that limits them: FLOPs, or bytes read and written.

FLOPs are those of matrix products, convolutions and attention, two per multiply-add. All other
operations are counted by the bytes that they read and write.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gpipe_hpc.planner.costs.attention import FLOP_FORMULAS
from gpipe_hpc.pytree import tensors_of
from gpipe_hpc.torch_compat import TorchDispatchMode


class OperationWork(NamedTuple):
    """FLOPs of matrix products, convolutions and attention, and bytes moved by other operations."""

    products: int = 0
    convolutions: int = 0
    attention: int = 0
    moved_bytes: int = 0

    @property
    def flops(self) -> int:
        """Return the total FLOPs."""
        return self.products + self.convolutions + self.attention

    def without(self, other: "OperationWork") -> "OperationWork":
        """Return the work left after subtracting `other`, at least 0 for each kind."""
        return OperationWork(*(max(0, own - less) for own, less in zip(self, other, strict=True)))

    @classmethod
    def together(cls, works: Iterable["OperationWork"]) -> "OperationWork":
        """Return the sum of several `OperationWork` counts."""
        return cls(*map(sum, zip(cls(), *works, strict=True)))


class PassWork(NamedTuple):
    """Work of a forward, of a backward, and of the backward for the input gradient alone."""

    forward: OperationWork = OperationWork()
    backward: OperationWork = OperationWork()
    of_input: OperationWork = OperationWork()

    @property
    def of_weight(self) -> OperationWork:
        """Return the work of the backward for weight gradients."""
        return self.backward.without(self.of_input)

    @classmethod
    def together(cls, passes: Sequence["PassWork"]) -> "PassWork":
        """Return the sum of the counts of several layers, pass by pass."""
        return cls(*map(OperationWork.together, zip(*passes, strict=True)))


_CONVOLUTIONS: Final = frozenset({"convolution", "_convolution", "convolution_backward"})
_ATTENTION: Final = "scaled_dot_product"
# These read only a few rows of a large table, as many bytes as they write.
_READS_ROWS: Final = frozenset({"embedding", "index_select", "gather", "index"})


class WorkCounter:
    """Context manager that counts FLOPs and moved bytes of all operations in its block."""

    def __init__(self) -> None:
        """Create a counter at zero."""
        self._modes = ExitStack()
        self._flops = FlopCounterMode(display=False, custom_mapping=dict(FLOP_FORMULAS))
        self._moved = _BytesMoved(self._flops.flop_registry)

    def __enter__(self) -> "WorkCounter":
        self._modes.enter_context(self._flops)
        self._modes.enter_context(self._moved)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._modes.__exit__(kind, error, trace)

    def so_far(self) -> OperationWork:
        """Return the work counted since the block began."""
        by_kind = {"products": 0, "convolutions": 0, "attention": 0}
        for operator, flops in self._flops.get_flop_counts().get("Global", {}).items():
            by_kind[_kind(_name(operator))] += flops
        return OperationWork(**by_kind, moved_bytes=self._moved.num_bytes)


def _name(operator: Any) -> str:
    packet = getattr(operator, "overloadpacket", operator)
    return str(getattr(packet, "__name__", packet))


def _kind(name: str) -> str:
    if name in _CONVOLUTIONS:
        return "convolutions"
    return "attention" if _ATTENTION in name else "products"


class _BytesMoved(TorchDispatchMode):
    """Dispatch mode that adds up the bytes read and written by operations without counted FLOPs.

    Views move no bytes.
    """

    def __init__(self, counted: Mapping[Any, object]) -> None:
        TorchDispatchMode.__init__(self)
        self._counted, self.num_bytes = counted, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation and add the bytes that it moves."""
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket not in self._counted and not func.is_view:
            written = _bytes_of(result)
            read = _bytes_of((args, kwargs))
            if func.overloadpacket.__name__ in _READS_ROWS:
                read = min(read, written)
            self.num_bytes += read + written
        return result


def _bytes_of(nest: Any) -> int:
    """Return the bytes of the distinct tensors of a nested value."""
    found: dict[int, Tensor] = {id(each): each for each in tensors_of(nest)}
    return sum(each.numel() * each.element_size() for each in found.values())
