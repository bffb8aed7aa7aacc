"""Pipelined chains: blocks of the vector follow one another from rank to rank.

After the first block has gone the length of the chain, every link carries a block in each step.
The best block weighs that fill against a start-up for each block (MVAPICH's pipelined chain).
"""

from collections.abc import Iterator

from gpipe_hpc.comm.collectives.plan import (
    Move,
    Place,
    Plan,
    Span,
    Step,
    blocks_of,
    moves,
    planned,
    renamed,
)


def chain_broadcast(place: Place, root: int, count: int, block: int) -> Plan:
    """Send blocks of `block` elements from the root along the chain of the others.

    ```text
    step     0      1      2      3
    0 -> 1   b0     b1     b2
    1 -> 2          b0     b1     b2
    ```
    """
    n, i = place.size, (place.position - root) % place.size
    blocks = blocks_of(count, block)

    def steps() -> Iterator[Step]:
        for t in range(len(blocks) + n - 2):
            yield Step(
                sends=_at(blocks, t - i, i + 1) if i < n - 1 else (),
                takes=_at(blocks, t - i + 1, i - 1) if i > 0 else (),
            )

    return renamed(planned(steps()), lambda peer: (peer + root) % n)


def chain_all_reduce(place: Place, count: int, block: int) -> Plan:
    """Sum blocks along the chain to its end, from where they go back, without a pause between.

    ```text
    n = 3    0      1      2      3      4
    0 -> 1   b0     b1
    1 -> 2          b0     b1            (sums)
    2 -> 1                 b0     b1
    1 -> 0                        b0     b1
    ```
    """
    n, i = place
    blocks = blocks_of(count, block)

    def steps() -> Iterator[Step]:
        for t in range(len(blocks) + 2 * n - 3):
            back = t - (n - 1) - (n - 1 - i)  # the block that leaves this rank on its way back
            yield Step(
                sends=(_at(blocks, t - i, i + 1) if i < n - 1 else ())
                + (_at(blocks, back, i - 1) if i > 0 else ()),
                adds=_at(blocks, t - i + 1, i - 1) if i > 0 else (),
                takes=_at(blocks, back + 1, i + 1) if i < n - 1 else (),
            )

    return planned(steps())


def _at(blocks: tuple[Span, ...], number: int, peer: int) -> tuple[Move, ...]:
    """Return the move of a block, if there is one of that number."""
    return moves(peer, blocks[number]) if 0 <= number < len(blocks) else ()
