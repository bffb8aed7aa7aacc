"""What ranks tell the first of all of what they have to write: most of them, very little.

Replicas have the same, except for shards and what the first copy alone keeps. So each rank hears
what the one at its place in the first replica has, and tells where it differs from that.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_hpc.checkpoint.states import Split

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

Sizes = Mapping[str, int]
"""The bytes of tensors, by their names in the checkpoint."""


class Told(NamedTuple):
    """What one rank tells; all of it in the first replica.

    `sizes`: of tensors that the rank at its place there has not, or otherwise. `lacks`: which of
    that one's it has not so: bit i is the i-th. `values` of the optimizer that are no tensors, and
    its `groups`; None: they are that one's. `states`: what modules keep beside.
    """

    sizes: Sizes
    lacks: int
    values: Split | None
    groups: list[dict[str, Any]] | None
    states: dict[str, Any]


def gather(
    pipe: "Pipeline",
    sizes: Sizes,
    values: Split,
    groups: list[dict[str, Any]],
    states: dict[str, Any],
) -> list[Told] | None:
    """Return what all ranks tell, on the first of them, None elsewhere; all ranks call it."""
    of_place = pipe.of_place
    leader = of_place.ranks[0]
    heard = of_place.broadcast_object((dict(sizes), values, groups), leader)
    own = Told(sizes, 0, values, groups, states)
    if pipe.world.rank != leader:
        theirs, their_values, their_groups = heard
        own = Told(
            {name: size for name, size in sizes.items() if theirs.get(name) != size},
            sum(1 << i for i, (n, size) in enumerate(theirs.items()) if sizes.get(n) != size),
            None if values == their_values else values,
            None if groups == their_groups else groups,
            states,
        )
    return pipe.everybody.gather_object(own, pipe.everybody.ranks[0])


def sizes_of_all(told: Sequence[Told], places: int) -> Iterator[Sizes]:
    """Yield what each rank has to write; `places`: the ranks of a replica."""
    for position, own in enumerate(told):
        theirs = told[position % places].sizes if position >= places else {}
        kept = {n: size for i, (n, size) in enumerate(theirs.items()) if not own.lacks >> i & 1}
        yield {**kept, **own.sizes}
