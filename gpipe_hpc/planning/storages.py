"""Which storages live on between the forward and the backward of a stage's micro-batch.

A layer that is not recomputed keeps what autograd saved of it. Neighbours that are recomputed form
a segment, which keeps its input alone: the nest that its first layer takes, and what its layers
pop that was stashed ahead of it. A storage that several keep lives once.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from gpipe_hpc.models import SkipNames
from gpipe_hpc.planning.trial import Crossing, LayerCount

OUTSIDE: Final = -1
"""Where a pop comes from that an earlier stage stashed: ahead of every segment."""


class Popped(NamedTuple):
    """What a layer pops: the position of the layer that stashed it, or OUTSIDE, and storages."""

    source: int
    storages: frozenset[int]


class LayerStorages(NamedTuple):
    """What one layer keeps, and what it would be run again from.

    `inside`: bytes that nobody else knows of; `kept`: storages of input and output that live if
    it is not recomputed; `value`: those of the nest that it takes.
    """

    inside: int
    kept: frozenset[int]
    value: frozenset[int]
    popped: tuple[Popped, ...]

    def with_loss(self, loss: "LayerStorages") -> "LayerStorages":
        """Return the last layer of a model and its loss as one: they are recomputed together."""
        return self._replace(inside=self.inside + loss.inside, kept=self.kept | loss.kept)


@dataclass(frozen=True)
class StageStorages:
    """The storages of one stage by number: their bytes, and who keeps them.

    `held` are those whose gradients will be sent back: they live in any case.
    """

    sizes: tuple[int, ...]
    held: frozenset[int]
    layers: tuple[LayerStorages, ...]

    def kept_bytes(self, recomputed: Collection[int]) -> int:
        """Return what lives of a micro-batch if the layers at these positions are recomputed."""
        live, inside = set(self.held), 0
        first = None  # of the segment that the layer is in
        for position, layer in enumerate(self.layers):
            if position not in recomputed:
                first = None
                inside += layer.inside
                live |= layer.kept
                continue
            if first is None:
                first = position
                live |= layer.value
            for source, storages in layer.popped:
                if source < first:
                    live |= storages
        return inside + sum(self.sizes[number] for number in live)

    @cached_property
    def all_bytes(self) -> int:
        """Return what lives of a micro-batch if nothing is recomputed."""
        return self.kept_bytes(())


class Follower:
    """Follow storages through the layers of a stage, from the boundary on."""

    def __init__(self, boundary: Crossing) -> None:
        self._sizes = list(boundary.tensors)
        self._held = _held(boundary, 0)
        self._value: tuple[int, ...] = tuple(range(len(self._sizes)))
        self._stashed: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._layers: list[LayerStorages] = []

    def receive(self, name: str, carried: Crossing) -> None:
        """Take in what an earlier stage stashed under a name."""
        first = len(self._sizes)
        self._sizes += carried.tensors
        self._held |= _held(carried, first)
        self._stashed[name] = OUTSIDE, tuple(range(first, len(self._sizes)))

    def run(self, count: LayerCount, names: SkipNames) -> None:
        """Go on behind the next layer."""
        self._layers.append(self._follow(count, names))

    def run_loss(self, count: LayerCount) -> None:
        """End with the loss, which goes with the last layer."""
        loss = self._follow(count, SkipNames())
        self._layers[-1:] = [last.with_loss(loss) for last in self._layers[-1:]] or [loss]

    def result(self) -> StageStorages:
        """Return what was found."""
        return StageStorages(tuple(self._sizes), self._held, tuple(self._layers))

    def _follow(self, count: LayerCount, names: SkipNames) -> LayerStorages:
        popped = [self._stashed.pop(name) for name in names.pops]
        given = [*self._value, *(number for _, numbers in popped for number in numbers)]
        made = count.kept.sizes[len(given) :]
        slots = [*given, *range(len(self._sizes), len(self._sizes) + len(made))]
        self._sizes += made
        found = LayerStorages(
            inside=count.kept.inside,
            kept=frozenset(slots[slot] for slot in count.kept.slots),
            value=frozenset(self._value),
            popped=tuple(Popped(source, frozenset(numbers)) for source, numbers in popped),
        )
        for name, places in zip(names.stashes, count.kept.stashes, strict=True):
            self._stashed[name] = len(self._layers), tuple(slots[slot] for slot in places)
        self._value = tuple(slots[slot] for slot in count.kept.outputs)
        return found


def _held(carried: Crossing, first: int) -> frozenset[int]:
    return frozenset(first + i for i, nbytes in enumerate(carried.gradients) if nbytes)
