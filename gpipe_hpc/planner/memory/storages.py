"""Storages of a stage's micro-batch that stay alive between forward and backward.

A stage is a sequence of runs of consecutive layers: in each run all layers are recomputed, or all
are kept (see `engine.stage_runner`). A kept layer keeps what autograd saved. A recomputed run keeps
its inputs: the value passed between layers, and all values stashed at that time; R recreates what
its layers save. A kept run keeps those of its inputs that receive a gradient. A storage kept
several times counts once.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpipe_hpc.models import SkipNames
from gpipe_hpc.planner.costs.layer_trial import BoundaryBytes, LayerCount


class LayerStorages(NamedTuple):
    """Storages that one layer saves, and those from which it could be recomputed.

    Attributes:
      inside: saved bytes that no other layer shares.
      kept: storages of input and output that are saved if the layer is not recomputed.
      made: storages that the layer creates.
      given: storages of all values available before the layer.
      leaves: those of `given` that receive a gradient.
      state: bytes of copies of the buffers that the layer changes, always alive.
    """

    inside: int
    kept: frozenset[int]
    made: frozenset[int]
    given: frozenset[int]
    leaves: frozenset[int]
    state: int = 0


class LifetimeBytes(NamedTuple):
    """Live bytes of one micro-batch: between F and R (`kept`), and between R and B (`full`)."""

    kept: int
    full: int


@dataclass(frozen=True)
class StageStorages:
    """The numbered storages of one stage: their bytes, and the layers that save them.

    `held` storages are always alive, because their gradients will be sent back.
    """

    sizes: tuple[int, ...]
    held: frozenset[int]
    layers: tuple[LayerStorages, ...]

    @cached_property
    def all_bytes(self) -> int:
        """Return the live bytes of a micro-batch without recomputation."""
        return self.lives(()).kept

    def nbytes(self, storages: Collection[int]) -> int:
        """Return the total bytes of some storages."""
        return sum(self.sizes[number] for number in storages)

    def lives(self, recomputed: Collection[int]) -> LifetimeBytes:
        """Return the live bytes of a micro-batch if the layers at these positions recompute."""
        live, inside, recreated = set(self.held), 0, 0
        made: set[int] = set()  # created in the recomputed run and not yet saved there
        before = None
        for position, layer in enumerate(self.layers):
            again = position in recomputed
            inside += layer.state
            if again is not before:
                live |= layer.given if again else layer.leaves
                made = set()
            if again:
                made |= layer.made
                recreated += layer.inside + self.nbytes(layer.kept & made)
                made -= layer.kept
            else:
                inside += layer.inside
                live |= layer.kept
            before = again
        kept = inside + self.nbytes(live)
        return LifetimeBytes(kept, kept + recreated)


class _PassedStorages(NamedTuple):
    """Storages of a value passed between layers, and those that receive a gradient."""

    storages: tuple[int, ...]
    leaves: frozenset[int]


class StorageTracker:
    """Assigns numbers to the storages of a stage, layer by layer, starting with its input."""

    def __init__(self, boundary: BoundaryBytes) -> None:
        self._sizes: list[int] = []
        self._layers: list[LayerStorages] = []
        self._stashed: dict[str, _PassedStorages] = {}
        self._value = self._arrived(boundary)
        self._held = self._value.leaves

    def receive(self, name: str, carried: BoundaryBytes) -> None:
        """Add a value that an earlier stage stashed under a name."""
        self._stashed[name] = self._arrived(carried)
        self._held |= self._stashed[name].leaves

    def run(self, count: LayerCount, names: SkipNames) -> None:
        """Add the storages of the next layer."""
        self._layers.append(self._follow(count, names))

    def run_loss(self, count: LayerCount) -> None:
        """Add the storages of the loss, which is recomputed together with the last layer."""
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
        """Return the storages of the stage after its last layer."""
        return StageStorages(tuple(self._sizes), self._held, tuple(self._layers))

    def _arrived(self, carried: BoundaryBytes) -> _PassedStorages:
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


def _tensors(storages: Collection[int], carried: BoundaryBytes) -> _PassedStorages:
    pairs = zip(storages, carried.gradients, strict=True)
    return _PassedStorages(tuple(storages), frozenset(number for number, nbytes in pairs if nbytes))
