"""Time every algorithm at every size on one number of ranks, and fit the link.

    python -m experiments.outer.collectives.measuring --out FILE     under a launcher

`measure` starts it on this machine; on a cluster, use any launcher that gpipe_hpc supports.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from experiments.outer.collectives.costs import FORMS, PIPELINED, Link
from experiments.outer.collectives.figures import Measurement, Timing
from experiments.outer.collectives.fitting import Fit, Sample, fit
from experiments.outer.collectives.lists import names_of, numbers
from experiments.outer.collectives.menu import (
    BACKEND,
    DEFAULT_BLOCK_BYTES,
    hosts_of,
    run_backend,
    start,
)
from experiments.outer.collectives.tuning import predicted
from gpipe_hpc.comm.collectives.group import Group
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.comm.world.world import World, collective_errors

SIZES: Final = (1024, 16 * 1024, 128 * 1024, 1024**2, 8 * 1024**2)
_WARM_UP: Final = 2
_AHEAD: Final = (("ring", 1024), ("ring", 1024**2), ("recursive_doubling", 64 * 1024))
"""All-reduces and bytes for the first fit, which determines the block sizes."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of both the ranks and the command."""
    add, shown = parser.add_argument, ",".join(FORMS)
    add("--collectives", type=names_of(FORMS), default=list(FORMS), help=f"some of {shown}")
    add("--bytes", type=numbers(4), default=list(SIZES), metavar="N,...", help="of the vectors")
    add("--repeats", type=int, default=9, help="measured rounds, after two more")
    add("--group", type=int, default=2, help="ranks that count as one host, for two levels")
    add("--device", default="cpu", help="cpu, or an accelerator as torch calls it")


def as_words(args: argparse.Namespace) -> list[str]:
    """Return the options of `add_options` as command-line words."""
    lists = {name: ",".join(map(str, getattr(args, name))) for name in ("collectives", "bytes")}
    plain = {name: str(getattr(args, name)) for name in ("repeats", "group", "device")}
    return [f"--{name}={value}" for name, value in (lists | plain).items()]


def main() -> None:
    """Measure; rank 0 writes the results."""
    parser = argparse.ArgumentParser(prog="python -m experiments.outer.collectives.measuring")
    add_options(parser)
    parser.add_argument("--backend", default="auto", help="gloo, mpi, nccl")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    world = start_world(device=args.device, backend=args.backend, timeout_s=120.0)
    with collective_errors(world, "timing collectives"):
        found = time_all(world, args.collectives, args.bytes, args.repeats, args.group)
    if world.rank == 0:
        args.out.write_text(json.dumps(found.as_json()))


class _Case(NamedTuple):
    """An algorithm and a vector size to be timed."""

    collective: str
    algorithm: str
    num_bytes: int
    block_bytes: int


def time_all(
    world: World, collectives: Sequence[str], sizes: Sequence[int], repeats: int, g: int
) -> Measurement:
    """Time every algorithm over float32 vectors of `sizes` bytes; the same call on every rank.

    The link is fitted to the algorithms that are not pipelined. The block sizes of the others are
    the best ones over a link that is measured first.
    """
    group = world.group([tuple(range(world.size))])
    ahead = _measured_link(world, group, g)
    cases = [
        _Case(
            collective, name, num_bytes, _block(ahead, collective, name, group.size, num_bytes, g)
        )
        for collective in collectives
        # Backends need equally many elements per rank.
        for num_bytes in sorted({_divided(size, group.size) for size in sizes})
        for name in (BACKEND, *FORMS[collective])
    ]
    timings = _time(world, group, cases, repeats, g)
    fitted = _fitted(group, timings, g)
    return Measurement(
        group.size, g, tuple(_formed(each, fitted.link, g) for each in timings), fitted
    )


def _measured_link(world: World, group: Group, g: int) -> Link:
    cases = [_Case("all_reduce", name, num_bytes, num_bytes) for name, num_bytes in _AHEAD]
    return _fitted(group, _time(world, group, cases, 5, g), g).link


def _fitted(group: Group, timings: Sequence[Timing], g: int) -> Fit:
    """Return the link fitted on the first rank, so that all ranks use equal values.

    It is fitted to lower quartiles, because other load only adds to times.
    """
    ours = [each for each in timings if each.algorithm != BACKEND]
    steps = [each for each in ours if each.algorithm not in PIPELINED] or ours
    own = fit([Sample(each.terms(g), each.quartiles_s[0]) for each in steps])
    found: Fit = group.broadcast_object(own, group.ranks[0])
    return found


def _divided(num_bytes: int, size: int) -> int:
    """Return about as many bytes, divided evenly by the ranks."""
    return 4 * size * max(1, round(num_bytes / (4 * size)))


def _block(link: Link, collective: str, name: str, size: int, num_bytes: int, g: int) -> int:
    if name not in PIPELINED:
        return 0
    return predicted(collective, name, link, size, num_bytes, g).block_bytes


def _formed(timing: Timing, link: Link, g: int) -> Timing:
    """Return a timing with its closed form."""
    if timing.algorithm == BACKEND:
        return timing
    return Timing(**{**vars(timing), "form_s": link.seconds(timing.terms(g))})


def _time(world: World, group: Group, cases: Sequence[_Case], repeats: int, g: int) -> list[Timing]:
    """Time the cases in rounds, so that other load affects all cases equally.

    All ranks start each case together. Each round has another order, equal on all ranks, because
    cases affect the caches of the next one.
    """
    longest = torch.zeros(max(case.num_bytes for case in cases) // 4, device=world.device.torch)
    runs = [_runner(group, case, longest[: case.num_bytes // 4], g) for case in cases]
    own_s = [[0.0] * len(cases) for _ in range(_WARM_UP + repeats)]
    for turn, took_s in enumerate(own_s):
        for place in random.Random(turn).sample(range(len(cases)), len(cases)):
            group.all_reduce(torch.zeros(1))
            began_s = time.perf_counter()
            runs[place]()
            world.device.synchronize()
            took_s[place] = time.perf_counter() - began_s
    # By rank, round and case.
    all_s = torch.tensor(group.all_gather_object(own_s[_WARM_UP:]), dtype=torch.float64)
    slowest_s = all_s.amax(0).T.tolist()
    return [
        Timing(group.size, *case[:3], tuple(seconds), block_bytes=case.block_bytes)
        for case, seconds in zip(cases, slowest_s, strict=True)
    ]


def _runner(group: Group, case: _Case, vector: torch.Tensor, g: int) -> Callable[[], None]:
    if case.algorithm == BACKEND:
        return lambda: run_backend(group, case.collective, vector)
    block_bytes, hosts = case.block_bytes or DEFAULT_BLOCK_BYTES, hosts_of(group.size, g)

    def run() -> None:
        start(
            *(group, case.collective, case.algorithm, vector),
            block_bytes=block_bytes,
            hosts=hosts,
        ).wait()

    return run


if __name__ == "__main__":
    main()
