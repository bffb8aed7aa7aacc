"""One bucket of parameters that replicas train apart, and its outer optimizer."""

from collections.abc import Collection, Mapping
from typing import Final

import torch
from torch import nn

from gpipe_hpc.comm.group import Pending
from gpipe_hpc.engine.outer.items import Item
from gpipe_hpc.engine.outer.settings import Outer
from gpipe_hpc.engine.outer.ways import Way

_ANCHOR: Final = "anchor."
_MOMENTUM: Final = "momentum."
_COMING: Final = "coming."


class Fragment:
    """Parameters that are averaged at once.

    Its anchor is what the parameters were after the last outer step, in float32 or wider, the same
    on all replicas. An outer step averages how far each replica has gone from there, ``anchor -
    parameter``, and gives that to SGD as the gradient of the anchor (Douillard et al., DiLoCo,
    2023, algorithm 1); rate 1 without momentum is the average of the parameters (Stich, Local SGD,
    2018). `way`: sums over the copies; None: there is no other.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], way: Way | None, outer: Outer) -> None:
        self._named, self._way, self._outer = dict(named), way, outer
        self._anchors: dict[str, torch.Tensor] = {}
        self._momenta: dict[str, torch.Tensor] = {}
        self._names: list[str] = []
        self._coming: torch.Tensor | None = None
        self._pending: Pending | None = None
        self.drop_anchor()

    @property
    def is_coming(self) -> bool:
        """Say whether an average is under way."""
        return self._coming is not None

    def drop_anchor(self) -> None:
        """Take what the parameters are now for what they were after an outer step."""
        self._anchors = {name: _wide(p).clone() for name, p in self._named.items()}
        self._momenta.clear()
        self._coming = self._pending = None

    def start(self, share: float, trained: Collection[str]) -> int:
        """Start averaging those parameters that were trained; `share`: this copy's of the average.

        Returns how many bytes the average is of.
        """
        assert self._coming is None, "the average before has arrived"
        self._names = [name for name in self._named if name in trained]
        if not self._names:
            return 0
        gone = [self._anchors[name] - _wide(self._named[name]) for name in self._names]
        self._coming = torch.cat([each.reshape(-1) for each in gone]).mul_(share)
        if self._way is not None:
            self._pending = self._way.start(self._coming, self._items())
        return self._coming.nbytes

    def _items(self) -> tuple[Item, ...]:
        items, start = [], 0
        for name in self._names:
            parameter = self._named[name]
            items.append(Item(name, parameter.shape, start, start + parameter.numel()))
            start += parameter.numel()
        return tuple(items)

    def finish(self, mix: float) -> None:
        """Step on the average, and give parameters what it made, with `mix` of their own."""
        self._arrive()
        if self._coming is None:
            return
        gone, self._coming = self._coming, None
        with torch.no_grad():
            for item in self._items():
                part = gone[item.start : item.stop].view(item.shape)
                anchor = self._step(item.name, part)
                parameter = self._named[item.name]
                kept = _wide(parameter) * mix + anchor * (1 - mix) if mix else anchor
                parameter.copy_(kept)

    def _arrive(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _step(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Step as torch.optim.SGD does; return the new anchor."""
        outer, anchor = self._outer, self._anchors[name]
        if outer.momentum:
            momentum = self._momenta.setdefault(name, torch.zeros_like(anchor))
            momentum.mul_(outer.momentum).add_(gradient)
            gradient = gradient + outer.momentum * momentum if outer.nesterov else momentum
        return anchor.sub_(gradient, alpha=outer.lr)

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint keeps, the same on all copies; waits for what is under way."""
        self._arrive()
        found = {_ANCHOR + name: each for name, each in self._anchors.items()}
        found |= {_MOMENTUM + name: each for name, each in self._momenta.items()}
        if self._coming is not None:
            for item in self._items():
                part = self._coming[item.start : item.stop].view(item.shape)
                found[_COMING + item.name] = part
        return found

    def wanted(self, stored: Collection[str]) -> list[str]:
        """Return which of the tensors of a checkpoint `restore` needs."""
        kinds = (_ANCHOR, _MOMENTUM, _COMING)
        return [k + name for name in self._named for k in kinds if k + name in stored]

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on with what a checkpoint kept; the parameters are loaded."""
        self.drop_anchor()
        for name, anchor in self._anchors.items():
            if _ANCHOR + name in tensors:
                anchor.copy_(tensors[_ANCHOR + name])
            if _MOMENTUM + name in tensors:
                self._momenta[name] = tensors[_MOMENTUM + name].to(anchor, copy=True)
        self._names = [name for name in self._named if _COMING + name in tensors]
        if self._names:
            parts = [tensors[_COMING + name].reshape(-1) for name in self._names]
            self._coming = torch.cat(parts)


def _wide(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's numbers in float32, or in its own dtype if that is wider."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
