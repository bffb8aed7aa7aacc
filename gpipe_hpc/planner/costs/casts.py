"""Track the low-precision copies of weights that autocast makes and caches for a whole step."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch import Tensor

from gpipe_hpc.torch_compat import TorchDispatchMode, operator

_TO_COPY: Final = operator("_to_copy")
_CAST: Final = None if _TO_COPY is None else _TO_COPY.default


class WeightCasts(TorchDispatchMode):
    """Dispatch mode that records casts of weights to another dtype and keeps the casts alive."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        TorchDispatchMode.__init__(self)
        self._weights = {storage_key(weight) for weight in weights}
        self._casts: list[tuple[int, Tensor]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation; record its result if it is a cast of a weight."""
        result = func(*args, **(kwargs or {}))
        if func is _CAST and storage_key(args[0]) in self._weights:
            self._casts.append((storage_key(args[0]), result))
        return result

    @property
    def storages(self) -> frozenset[int]:
        """Return the keys of the storages of all casts."""
        return frozenset(storage_key(cast) for _, cast in self._casts)

    def kept_bytes(self, later: "WeightCasts") -> Counter[int]:
        """Return the bytes of casts that a later run of the layer reused, by weight storage."""
        return self._nbytes() - later._nbytes()

    def _nbytes(self) -> Counter[int]:
        total: Counter[int] = Counter()
        for weight, cast in self._casts:
            total[weight] += cast.nbytes
        return total


def storage_key(tensor: Tensor) -> int:
    """Return a key that identifies the storage of a tensor while it is alive."""
    # On the meta device storages have no data address, but their objects have one.
    return int(tensor.untyped_storage()._cdata)
