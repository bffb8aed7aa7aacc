"""Compact reports of what each rank has to write, gathered on the first rank.

Replicas have the same tensors, except for shards and for what only the first replica stores. Each
rank therefore receives the report of its counterpart in the first replica and sends the
differences.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_hpc.checkpoint.states import Split

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

Sizes = Mapping[str, int]
"""Sizes of tensors in bytes, by their names in the checkpoint."""


class RankReport(NamedTuple):
    """Report of one rank, as difference from its counterpart in the first replica.

    Args:
        sizes: tensors that the counterpart does not have, or has with another size.
        lacks: bit mask of the counterpart's tensors that this rank does not have.
        values: non-tensor optimizer values; None if equal to the counterpart's.
        groups: descriptions of parameter groups; None if equal to the counterpart's.
        states: encoded extra states of modules.
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
) -> list[RankReport] | None:
    """Gather the reports of all ranks on the first rank; return None on the others. Collective."""
    dp_group = pipe.dp_group
    leader = dp_group.ranks[0]
    heard = dp_group.broadcast_object((dict(sizes), values, groups), leader)
    own = RankReport(sizes, 0, values, groups, states)
    if pipe.world.rank != leader:
        theirs, their_values, their_groups = heard
        own = RankReport(
            {name: size for name, size in sizes.items() if theirs.get(name) != size},
            sum(1 << i for i, (n, size) in enumerate(theirs.items()) if sizes.get(n) != size),
            None if values == their_values else values,
            None if groups == their_groups else groups,
            states,
        )
    return pipe.world_group.gather_object(own, pipe.world_group.ranks[0])


def sizes_of_all(told: Sequence[RankReport], places: int) -> Iterator[Sizes]:
    """Yield the tensor sizes of each rank; each replica has `places` ranks."""
    for position, own in enumerate(told):
        theirs = told[position % places].sizes if position >= places else {}
        kept = {n: size for i, (n, size) in enumerate(theirs.items()) if not own.lacks >> i & 1}
        yield {**kept, **own.sizes}
