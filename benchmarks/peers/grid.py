"""The contestants and blocks of the full benchmark, most important first."""

from dataclasses import replace

from benchmarks.cells import (
    CONTESTANTS,
    FULL,
    OTHER,
    OUR_MAIN,
    RARE,
    Block,
    Cell,
    Contestant,
    floor_cell,
    named_schedules,
    our_cells,
    torch_cells,
    unpiped_cells,
)

# The part of the full benchmark with the schedules that no claim is about.
OTHERS = "other schedules"
WORKLOADS = ("A", "B", "C", "T", "A16")
MICROBATCHES = (1, 2, 4, 8, 16)
# Workload and number of micro-batches of the blocks that the claims are about.
FIRST = (
    ("A", 4),
    ("C", 16),
    ("B", 16),
    ("A", 16),
    ("T", 16),
    ("A", 8),
    ("C", 4),
    ("B", 4),
    ("C", 8),
    ("B", 8),
    ("A16", 8),
)
# The slowest of torch's schedules here: fewer steps are enough.
_SLOW = "InterleavedZeroBubble"
_AGAIN = ("gpipe", "one_f_one_b", "auto")


def contestants(peer_python: str | None) -> list[Contestant]:
    """Return all contestants; those with a separate environment only if it exists."""
    found = [
        *CONTESTANTS,
        Contestant("fairscale", "benchmarks.peers.pipe_peers:FairscalePipe", 1, 2),
    ]
    if peer_python is not None:
        found.append(
            Contestant(
                "deepspeed", "benchmarks.peers.deepspeed_peer:DeepSpeedPipeline", python=peer_python
            )
        )
        found.append(
            Contestant(
                "torchgpipe", "benchmarks.peers.pipe_peers:TorchGPipe", 1, 2, python=peer_python
            )
        )
    return found


def peer_cells(workload: str, microbatches: int) -> list[Cell]:
    """Return the cells of DeepSpeed, fairscale's Pipe and torchgpipe."""
    return [
        Cell("deepspeed", workload, "1F1B", microbatches, wanted=OTHER),
        Cell("deepspeed", workload, "1F1B", microbatches, "always", wanted=OTHER),
        Cell("fairscale", workload, "Pipe", microbatches, wanted=RARE),
        Cell("fairscale", workload, "Pipe", microbatches, "except_last", wanted=RARE),
        Cell("torchgpipe", workload, "GPipe", microbatches, wanted=RARE),
        Cell("torchgpipe", workload, "GPipe", microbatches, "except_last", wanted=RARE),
    ]


def core(workload: str, microbatches: int) -> Block:
    """Return the block on which the claims are based: the main schedules and all peers."""
    ours = our_cells(workload, microbatches, OUR_MAIN)
    again = [replace(cell, recompute="except_last") for cell in ours if cell.variant in _AGAIN]
    theirs = [
        replace(cell, wanted=OTHER) if cell.variant == _SLOW else cell
        for cell in torch_cells(workload, microbatches)
    ]
    cells = [
        floor_cell(workload, microbatches),
        *ours,
        *again,
        *theirs,
        *unpiped_cells(workload, microbatches),
        *peer_cells(workload, microbatches),
    ]
    return Block(workload, microbatches, FULL, tuple(cells))


def others(workload: str, microbatches: int) -> Block:
    """Return all other schedules, next to two main ones."""
    names = [name for name in named_schedules() if name not in OUR_MAIN]
    cells = [
        floor_cell(workload, microbatches),
        *our_cells(workload, microbatches, ("gpipe", "one_f_one_b", *names), wanted=OTHER),
    ]
    return Block(workload, microbatches, OTHERS, tuple(cells))


def blocks() -> tuple[list[Block], list[Block]]:
    """Return the blocks for the claims and all others, most important first."""
    first = [core(*each) for each in FIRST]
    everywhere = [(w, m) for m in (8, 16, 4, 2, 1) for w in WORKLOADS]
    rest = [*(others(workload, 8) for workload in WORKLOADS), others("T", 16)]
    rest += [core(*each) for each in everywhere if each not in FIRST]
    return first, rest
