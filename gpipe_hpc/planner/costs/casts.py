"""Which weights autocast casts, and which of the copies it keeps for a whole step."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch import Tensor

from gpipe_hpc.torch_compat import TorchDispatchMode, operator

_TO_COPY: Final = operator("_to_copy")
_CAST: Final = None if _TO_COPY is None else _TO_COPY.default


class WeightCasts(TorchDispatchMode):
    """Note each copy of a weight that is made for another dtype, and hold on to it."""

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
        """Run one operation; note its result if that is a cast of a weight."""
        result = func(*args, **(kwargs or {}))
        if func is _CAST and storage_key(args[0]) in self._weights:
            self._casts.append((storage_key(args[0]), result))
        return result

    @property
    def storages(self) -> frozenset[int]:
        """Return the storages of all copies."""
        return frozenset(storage_key(cast) for _, cast in self._casts)

    def kept_bytes(self, later: "WeightCasts") -> Counter[int]:
        """Return, by the weight's storage, what a later run of the same layer did not copy anew."""
        return self._nbytes() - later._nbytes()

    def _nbytes(self) -> Counter[int]:
        total: Counter[int] = Counter()
        for weight, cast in self._casts:
            total[weight] += cast.nbytes
        return total


def storage_key(tensor: Tensor) -> int:
    """Return what tells a storage from all others that live."""
    # On the meta device no storage has an address; its object has one.
    return int(tensor.untyped_storage()._cdata)
