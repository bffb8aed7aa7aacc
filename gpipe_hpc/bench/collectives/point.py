"""What the ranks of one number do: time every algorithm at every size, and fit the link."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from gpipe_hpc.bench.collectives.figures import Found, Timing
from gpipe_hpc.comm.collectives.costs import FORMS, Link
from gpipe_hpc.comm.collectives.fitting import Sample, fit
from gpipe_hpc.comm.collectives.menu import (
    BACKEND,
    DEFAULT_BLOCK_BYTES,
    start_all_gather,
    start_all_reduce,
    start_broadcast,
    start_reduce_scatter,
)
from gpipe_hpc.comm.collectives.shards import shards
from gpipe_hpc.comm.collectives.tuning import predicted, terms
from gpipe_hpc.comm.group import Group, Pending
from gpipe_hpc.comm.world import World, together
from gpipe_hpc.config import Config
from gpipe_hpc.config.commands import DONE_EXIT_CODE, Job, run_jobs, say_error
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
        return say_error(error)
    return DONE_EXIT_CODE


def _measure(config: Config) -> None:
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    world = join_world(config)
    with together(world, "timing collectives"):
        found = time_all(world, config.bench.message_bytes, config.bench.repeats)
    if world.rank == 0 and config.bench.out is not None:
        Path(config.bench.out).write_text(json.dumps(found.told()))


def time_all(world: World, sizes: Sequence[int], repeats: int) -> Found:
    """Time every algorithm over float32 vectors of `sizes` bytes; the same on every rank.

    The link is fitted to all of ours except the chains, whose best block it tells: what the closed
    form says of a chain is foretold.
    """
    group = world.group([tuple(range(world.size))])
    fixed: list[tuple[str, str, int]] = []
    chains: list[tuple[str, str, int]] = []
    for collective, names in FORMS.items():
        for num_bytes in sizes:
            for name in (BACKEND, *names):
                case = (collective, name, num_bytes)
                (chains if name == "chain" else fixed).append(case)
    timings = [_time(world, group, repeats, *case) for case in fixed]
    fitted = fit([_sample(t) for t in timings if t.algorithm != BACKEND])
    for collective, name, num_bytes in chains:
        block = predicted(collective, name, fitted.link, group.size, num_bytes).block_bytes
        timings.append(_time(world, group, repeats, collective, name, num_bytes, block))
    timings.sort(key=lambda t: (t.collective, t.num_bytes))
    return Found(group.size, tuple(_formed(t, fitted.link) for t in timings), fitted)


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


def _time(
    world: World,
    group: Group,
    repeats: int,
    collective: str,
    algorithm: str,
    num_bytes: int,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
) -> Timing:
    """Time one case; each repetition begins with all ranks together."""
    # As many elements for each rank: backends cut no other way.
    per_rank = max(1, round(num_bytes / (4 * group.size)))
    vector = torch.zeros(per_rank * group.size, device=world.device)
    run = _runner(group, collective, algorithm, vector, block_bytes)
    own_s = []
    for turn in range(_WARM_UP + repeats):
        group.all_reduce(torch.zeros(1))
        began_s = time.perf_counter()
        run()
        _finish(world)
        if turn >= _WARM_UP:
            own_s.append(time.perf_counter() - began_s)
    slowest_s = map(max, zip(*group.all_gather_object(own_s), strict=True))
    block = block_bytes if algorithm == "chain" else 0
    return Timing(
        group.size, collective, algorithm, vector.nbytes, tuple(slowest_s), block_bytes=block
    )


def _runner(
    group: Group, collective: str, algorithm: str, vector: torch.Tensor, block_bytes: int
) -> Callable[[], None]:
    """Return what carries out a collective once, to its end."""
    if algorithm == BACKEND:
        return _backends_own(group, collective, vector)
    starts: dict[str, Callable[[], Pending]] = {
        "all_reduce": lambda: start_all_reduce(group, vector, algorithm, block_bytes=block_bytes),
        "broadcast": lambda: start_broadcast(
            group, vector, group.ranks[0], algorithm, block_bytes=block_bytes
        ),
        "reduce_scatter": lambda: start_reduce_scatter(group, vector, None, algorithm),
        "all_gather": lambda: start_all_gather(group, vector, None, algorithm),
    }
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
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


if __name__ == "__main__":
    main()
