"""What the ranks of one number do: time every algorithm at every size, and fit the link."""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from gpipe_hpc.bench.collectives.figures import Found, Timing
from gpipe_hpc.bench.running import say_failure
from gpipe_hpc.comm.collectives.costs import FORMS, Link
from gpipe_hpc.comm.collectives.fitting import Fit, Sample, fit
from gpipe_hpc.comm.collectives.menu import (
    BACKEND,
    DEFAULT_BLOCK_BYTES,
    start_all_gather,
    start_all_reduce,
    start_broadcast,
    start_reduce_scatter,
)
from gpipe_hpc.comm.collectives.shards import shards
from gpipe_hpc.comm.collectives.tuned import measured_link
from gpipe_hpc.comm.collectives.tuning import predicted, terms
from gpipe_hpc.comm.collectives.wide import WideGroup
from gpipe_hpc.comm.cores.bind import bound
from gpipe_hpc.comm.group import Group, Pending
from gpipe_hpc.comm.world import World, together
from gpipe_hpc.config import Config
from gpipe_hpc.config.commands import DONE_EXIT_CODE, Job, run_jobs
from gpipe_hpc.errors import GpipeError
from gpipe_hpc.training.joining import join_world

_WARM_UP: Final = 2


def main() -> None:
    """Compose the settings from the command line, measure, and write bench.out."""
    sys.exit(run_jobs(_task, "bench"))


def _task(job: Job) -> int:
    try:
        _measure(job.config)
    except GpipeError as error:
        return say_failure(error, job.config)
    return DONE_EXIT_CODE


def _measure(config: Config) -> None:
    world = join_world(config)
    with (
        bound(world, config.train.bind, config.train.num_threads),
        together(world, "timing collectives"),
    ):
        found = time_all(world, config.bench.message_bytes, config.bench.repeats)
    if world.rank == 0 and config.bench.out is not None:
        Path(config.bench.out).write_text(json.dumps(found.told()))


class _Case(NamedTuple):
    """What is timed: an algorithm over a vector of so many bytes."""

    collective: str
    algorithm: str
    num_bytes: int
    block_bytes: int = 0  # of chains


def time_all(world: World, sizes: Sequence[int], repeats: int) -> Found:
    """Time every algorithm over float32 vectors of `sizes` bytes; the same on every rank.

    The link is fitted to all of ours except the chains: what the closed form says of a chain is
    foretold. Their blocks are the best over a link that is measured ahead.
    """
    group = world.group([tuple(range(world.size))])
    ahead = measured_link(group, world.device).link
    cases = [
        _Case(collective, name, num_bytes, _block(ahead, collective, name, group.size, num_bytes))
        for collective, names in FORMS.items()
        # As many elements for each rank: backends cut no other way.
        for num_bytes in sorted({_divided(size, group.size) for size in sizes})
        for name in (BACKEND, *names)
    ]
    timings = _time(world, group, cases, repeats)
    ours = [t for t in timings if t.algorithm not in (BACKEND, "chain")]
    fitted: Fit = group.broadcast_object(fit([_sample(each) for each in ours]), group.ranks[0])
    return Found(group.size, tuple(_formed(each, fitted.link) for each in timings), fitted)


def _divided(num_bytes: int, size: int) -> int:
    """Return the bytes, about as many, of which each rank has as many elements."""
    return 4 * size * max(1, round(num_bytes / (4 * size)))


def _block(link: Link, collective: str, name: str, size: int, num_bytes: int) -> int:
    is_chain = name == "chain"
    return predicted(collective, name, link, size, num_bytes).block_bytes if is_chain else 0


def _sample(timing: Timing) -> Sample:
    one = terms(timing.collective, timing.algorithm, timing.ranks, timing.num_bytes, 1)
    return Sample(one, timing.median_s)


def _formed(timing: Timing, link: Link) -> Timing:
    """Return a timing with what its closed form says."""
    if timing.algorithm == BACKEND:
        return timing
    form = FORMS[timing.collective][timing.algorithm]
    seconds = link.seconds(form(timing.ranks, timing.num_bytes, timing.block_bytes or 1))
    return Timing(**{**vars(timing), "form_s": seconds})


def _time(world: World, group: Group, cases: Sequence[_Case], repeats: int) -> list[Timing]:
    """Time the cases in turn, round after round: what disturbs for a while disturbs them all.

    Each begins with all ranks together, and each round has an order of its own, the same on every
    rank: what a case leaves behind in caches is not always for the same one.
    """
    longest = torch.zeros(max(case.num_bytes for case in cases) // 4, device=world.device.torch)
    runs = [_runner(group, case, longest[: case.num_bytes // 4]) for case in cases]
    own_s = [[0.0] * len(cases) for _ in range(_WARM_UP + repeats)]
    for turn, took_s in enumerate(own_s):
        for place in random.Random(turn).sample(range(len(cases)), len(cases)):
            group.all_reduce(torch.zeros(1))
            began_s = time.perf_counter()
            runs[place]()
            _finish(world)
            took_s[place] = time.perf_counter() - began_s
    # By rank, round and case.
    told_s = torch.tensor(group.all_gather_object(own_s[_WARM_UP:]), dtype=torch.float64)
    slowest_s = told_s.amax(0).T.tolist()
    return [
        Timing(group.size, *case[:3], tuple(seconds), block_bytes=case.block_bytes)
        for case, seconds in zip(cases, slowest_s, strict=True)
    ]


def _runner(group: Group, case: _Case, vector: torch.Tensor) -> Callable[[], None]:
    """Return what carries out a collective once, to its end."""
    collective, algorithm, _, block_bytes = case
    if algorithm == BACKEND and not isinstance(group, WideGroup):
        return _backends_own(group, collective, vector)
    block_bytes = block_bytes or DEFAULT_BLOCK_BYTES
    starts: dict[str, Callable[[], Pending]] = {
        "all_reduce": lambda: start_all_reduce(group, vector, algorithm, block_bytes=block_bytes),
        "broadcast": lambda: start_broadcast(
            group, vector, group.ranks[0], algorithm, block_bytes=block_bytes
        ),
        "reduce_scatter": lambda: start_reduce_scatter(group, vector, None, algorithm),
        "all_gather": lambda: start_all_gather(group, vector, None, algorithm),
    }
    if algorithm == BACKEND:  # of so many ranks no group of the backend's own is formed
        starts["reduce_scatter"] = lambda: group.start_reduce_scatter(vector)
        starts["all_gather"] = lambda: group.start_all_gather(vector)
    start = starts[collective]
    return lambda: start().wait()


def _backends_own(group: Group, collective: str, vector: torch.Tensor) -> Callable[[], None]:
    own, backend = shards(vector, None, group.size)[group.position].clone(), group.torch_group
    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(vector, group=backend),
        "broadcast": lambda: dist.broadcast(vector, group.ranks[0], group=backend),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, vector, group=backend),
        "all_gather": lambda: dist.all_gather_into_tensor(vector, own, group=backend),
    }
    run = runs[collective]

    def once() -> None:
        run()

    return once


def _finish(world: World) -> None:
    """Wait for what the device still has to do."""
    world.device.synchronize()


if __name__ == "__main__":
    main()
