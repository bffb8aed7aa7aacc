"""Which copy of a stage owns which whole tensors, as fairscale's OSS divides them."""

from collections.abc import Mapping


def in_turn(sizes: Mapping[str, int]) -> list[str]:
    """Return tensors in the order in which they are given to owners: the largest first.

    So the last ones even out what each has. `sizes`: their elements, in the stage's order.
    """
    return sorted(sizes, key=lambda name: -sizes[name])


def owners(
    sizes: Mapping[str, int], trained: Mapping[str, bool], num_copies: int
) -> dict[str, int]:
    """Return the owner of each tensor, given out `in_turn`: the copy that has least so far.

    A frozen tensor counts as one element. OSS divides so; a test holds the two together.
    """
    load = [0] * num_copies
    found: dict[str, int] = {}
    for name in in_turn(sizes):
        found[name] = load.index(min(load))
        load[found[name]] += sizes[name] if trained[name] else 1
    return found
