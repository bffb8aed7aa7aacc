"""Inputs and outputs of a stage: boundaries to its neighbours, and skips to other stages."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from gpipe_hpc.models import Skip, skip_routes
from gpipe_hpc.pytree import Nest, map_tensors, tensors_of

BATCH = -1
"""The source of stage 0: the batch itself."""


class State(NamedTuple):
    """The value between two layers, and the values stashed for later ones."""

    nest: Nest
    stashed: dict[str, Nest]

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors in it, each once."""
        nest, stashed = self
        return tensors_of((nest, stashed)) if stashed else tensors_of(nest)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "State":
        """Return it with each tensor replaced by `function` of it, in new containers."""
        nest, stashed = self
        if not stashed:
            return State(map_tensors(function, nest), {})
        nest, stashed = map_tensors(function, (nest, stashed))
        return State(nest, stashed)


class Edge(NamedTuple):
    """A connection to another stage: its skips by name; to a neighbour also the boundary."""

    stage: int
    names: tuple[str, ...] = ()


class StageRoutes(NamedTuple):
    """The edges of one stage, that to its neighbour first; the last stage has no destination."""

    sources: tuple[Edge, ...]
    destinations: tuple[Edge, ...]

    def gather(self, parts: Sequence[Nest]) -> State:
        """Combine the received parts, one for each source."""
        if len(parts) == 1 and not self.sources[0].names:
            return State(parts[0], {})
        (first, *others), stashed = zip(self.sources, parts, strict=True), dict[str, Nest]()
        edge, nest = first
        if edge.names:
            nest, *values = nest
            stashed.update(zip(edge.names, values, strict=True))
        for edge, part in others:
            stashed.update(zip(edge.names, part, strict=True))
        return State(nest, stashed)

    def scatter(self, state: State) -> list[Nest]:
        """Split an output into one part for each destination."""
        nest, stashed = state
        if len(self.destinations) == 1 and not self.destinations[0].names:
            return [nest]
        parts = [tuple(stashed[name] for name in edge.names) for edge in self.destinations]
        if parts:
            parts[0] = (nest, *parts[0]) if parts[0] else nest
        return parts


def stage_routes(skips: Sequence[Skip], counts: Sequence[int]) -> list[StageRoutes]:
    """Return the edges of each stage of a cut; a skip to the next one rides with the boundary."""
    routes = skip_routes(skips, counts).items()
    crossing = {ends: tuple(skip.name for skip in own) for ends, own in routes}
    num = len(counts)
    return [
        StageRoutes(
            _edges(stage - 1, {s: n for (s, d), n in crossing.items() if d == stage}),
            _edges(stage + 1, {d: n for (s, d), n in crossing.items() if s == stage})
            if stage < num - 1
            else (),
        )
        for stage in range(num)
    ]


def _edges(neighbour: int, names: dict[int, tuple[str, ...]]) -> tuple[Edge, ...]:
    near = Edge(neighbour, names.pop(neighbour, ()))
    return (near, *(Edge(stage, names[stage]) for stage in sorted(names)))
