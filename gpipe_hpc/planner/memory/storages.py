"""Which storages live on between the forward and the backward of a stage's micro-batch.

The layers of a stage go in runs of neighbours that are treated alike (see `engine.stage_runner`). A
layer that is not recomputed keeps what autograd saved of it. A run that is recomputed keeps what it
started from: the nest on its way, and all that is stashed at that time; R makes anew what its
layers save. One that is not holds on to that part of its input which a gradient comes for. A
storage that several keep lives once.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpipe_hpc.models import SkipNames
from gpipe_hpc.planner.costs.trial import Crossing, LayerCount


class LayerStorages(NamedTuple):
    """What one layer keeps, and what it would be run again from.

    `inside`: bytes that nobody else knows of; `kept`: storages of input and output that live if
    it is not recomputed; `made`: those that are new with it; `given`: those of all that stands in
    front of it; `leaves`: those of them that a gradient comes for. `state`: bytes of copies of the
    buffers that it changes, which live in any case.
    """

    inside: int
    kept: frozenset[int]
    made: frozenset[int]
    given: frozenset[int]
    leaves: frozenset[int]
    state: int = 0


class Lives(NamedTuple):
    """Bytes that live of one micro-batch: from F to R, and from there to B."""

    kept: int
    full: int


@dataclass(frozen=True)
class StageStorages:
    """The storages of one stage by number: their bytes, and who keeps them.

    `held` are those whose gradients will be sent back: they live in any case.
    """

    sizes: tuple[int, ...]
    held: frozenset[int]
    layers: tuple[LayerStorages, ...]

    @cached_property
    def all_bytes(self) -> int:
        """Return what lives of a micro-batch if nothing is recomputed."""
        return self.lives(()).kept

    def nbytes(self, storages: Collection[int]) -> int:
        """Return the bytes of some storages."""
        return sum(self.sizes[number] for number in storages)

    def lives(self, recomputed: Collection[int]) -> Lives:
        """Return what lives of a micro-batch if the layers at these positions are recomputed."""
        live, inside, anew = set(self.held), 0, 0
        made: set[int] = set()  # within the run that is recomputed, and not yet saved there
        before = None
        for position, layer in enumerate(self.layers):
            again = position in recomputed
            inside += layer.state
            if again is not before:
                live |= layer.given if again else layer.leaves
                made = set()
            if again:
                made |= layer.made
                anew += layer.inside + self.nbytes(layer.kept & made)
                made -= layer.kept
            else:
                inside += layer.inside
                live |= layer.kept
            before = again
        kept = inside + self.nbytes(live)
        return Lives(kept, kept + anew)


class _Tensors(NamedTuple):
    """Tensors of a nest on their way: the storages, and those that a gradient comes for."""

    storages: tuple[int, ...]
    leaves: frozenset[int]


class Follower:
    """Follow storages through the layers of a stage, from the boundary on."""

    def __init__(self, boundary: Crossing) -> None:
        self._sizes: list[int] = []
        self._layers: list[LayerStorages] = []
        self._stashed: dict[str, _Tensors] = {}
        self._value = self._arrived(boundary)
        self._held = self._value.leaves

    def receive(self, name: str, carried: Crossing) -> None:
        """Take in what an earlier stage stashed under a name."""
        self._stashed[name] = self._arrived(carried)
        self._held |= self._stashed[name].leaves

    def run(self, count: LayerCount, names: SkipNames) -> None:
        """Go on behind the next layer."""
        self._layers.append(self._follow(count, names))

    def run_loss(self, count: LayerCount) -> None:
        """End with the loss: it is recomputed together with the last layer."""
        loss = self._follow(count, SkipNames())
        if self._layers:
            last = self._layers.pop()
            loss = last._replace(
                inside=last.inside + loss.inside,
                kept=last.kept | loss.kept,
                made=last.made | loss.made,
                state=last.state + loss.state,
            )
        self._layers.append(loss)

    def result(self) -> StageStorages:
        """Return what was found."""
        return StageStorages(tuple(self._sizes), self._held, tuple(self._layers))

    def _arrived(self, carried: Crossing) -> _Tensors:
        first = len(self._sizes)
        self._sizes += carried.tensors
        return _tensors(range(first, len(self._sizes)), carried)

    def _follow(self, count: LayerCount, names: SkipNames) -> LayerStorages:
        standing = [self._value, *self._stashed.values()]
        popped = [self._stashed.pop(name) for name in names.pops]
        given = [number for each in (self._value, *popped) for number in each.storages]
        made = count.kept.sizes[len(given) :]
        slots = [*given, *range(len(self._sizes), len(self._sizes) + len(made))]
        self._sizes += made
        self._value = _tensors([slots[slot] for slot in count.kept.outputs], count.output)
        for name, places, carried in zip(
            names.stashes, count.kept.stashes, count.stashed, strict=True
        ):
            self._stashed[name] = _tensors([slots[slot] for slot in places], carried)
        return LayerStorages(
            inside=count.kept.inside,
            kept=frozenset(slots[slot] for slot in count.kept.slots),
            made=frozenset(slots[len(given) :]),
            given=frozenset(number for each in standing for number in each.storages),
            leaves=frozenset(number for each in standing for number in each.leaves),
            state=count.state_bytes,
        )


def _tensors(storages: Collection[int], carried: Crossing) -> _Tensors:
    pairs = zip(storages, carried.gradients, strict=True)
    return _Tensors(tuple(storages), frozenset(number for number, nbytes in pairs if nbytes))
