"""What messages have lost so far, on one copy of a stage."""

from collections.abc import Mapping, Sequence

import torch

from gpipe_hpc.engine.outer.items import Item


class Residuals:
    """The residuals of parameters, those of a bucket in one flat buffer.

    Parameters may change their bucket, as when others are frozen: their residuals go with them.
    """

    def __init__(self) -> None:
        self._flats: dict[tuple[str, ...], tuple[torch.Tensor, tuple[Item, ...]]] = {}
        self._loose: dict[str, torch.Tensor] = {}  # in no bucket so far

    def of(self, items: Sequence[Item], like: torch.Tensor) -> torch.Tensor:
        """Return the buffer of a bucket's residuals: float64 as `like`, else float32."""
        names = tuple(item.name for item in items)
        if names in self._flats:
            return self._flats[names][0]
        for other in [each for each in self._flats if not set(each).isdisjoint(names)]:
            flat, moved = self._flats.pop(other)
            self._loose |= {item.name: _part(flat, item).clone() for item in moved}
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        flat = torch.zeros(like.numel(), dtype=wide, device=like.device)
        for item in items:
            if item.name in self._loose:
                _part(flat, item).copy_(self._loose.pop(item.name))
        self._flats[names] = flat, tuple(items)
        return flat

    def named(self) -> dict[str, torch.Tensor]:
        """Return the residual of each parameter that has one, in its shape."""
        held = {i.name: _part(flat, i) for flat, items in self._flats.values() for i in items}
        return {**self._loose, **held}

    def restore(self, named: Mapping[str, torch.Tensor]) -> None:
        """Forget all of them and go on with these."""
        self._flats.clear()
        self._loose = dict(named)


def _part(flat: torch.Tensor, item: Item) -> torch.Tensor:
    return flat[item.start : item.stop].view(item.shape)
