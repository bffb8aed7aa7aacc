"""Program of the ranks that measure one point: train some steps and report their times."""

import json
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from gpipe_hpc.bench.running import print_failure
from gpipe_hpc.comm.collectives.rank_summary import summarise_ranks
from gpipe_hpc.comm.world.launcher import detect_launch
from gpipe_hpc.config import CommandJob, ExitCode, check_config, run_jobs
from gpipe_hpc.device.cores.bind import bound
from gpipe_hpc.errors import GpipeError
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.figures.throughput import tokens_per_sample
from gpipe_hpc.trainer.one_step import refuse_non_finite, train_one_step
from gpipe_hpc.trainer.run.identity import UNRECORDED, RunIdentity
from gpipe_hpc.trainer.session import Session
from gpipe_hpc.trainer.start import open_session
from gpipe_hpc.trainer.start_world import join_world
from gpipe_hpc.trainer.step_boundary import RankStepInfo, StepBoundary, agree

_WARM_UP: Final = 2


def main() -> None:
    """Compose the settings from the command line, measure, and write the file bench.out."""
    sys.exit(run_jobs(_task, "bench"))


def _task(job: CommandJob) -> int:
    try:
        _measure(job.config)
    except GpipeError as error:
        return print_failure(error, job.config)
    return ExitCode.DONE


def _measure(config: Config) -> None:
    check_config(config, detect_launch().world_size)
    steps = _WARM_UP + config.bench.steps
    # Run as many steps as are measured, and do not resume from a checkpoint.
    config.train = replace(config.train, steps=max(config.train.steps, steps), stop_at=None)
    config.checkpoint = replace(config.checkpoint, resume="never")
    world = join_world(config)
    with (
        bound(world, config.train.bind, config.train.num_threads),
        tempfile.TemporaryDirectory(prefix="gpipe_hpc_bench_") as own,
    ):
        folder = Path(world.world_group.broadcast_object(own if world.rank == 0 else None, root=0))
        run = RunIdentity(folder, UNRECORDED, is_repeated=False)
        with closing(open_session(config, world, run, None)) as session:
            found = _steps(session, config.bench.steps)
        if world.rank == 0 and config.bench.out is not None:
            Path(config.bench.out).write_text(json.dumps(found))


def _steps(session: Session, num_steps: int) -> dict[str, Any]:
    """Train and time some steps; return the fields of `PointResult`, equal on every rank."""
    pipe, config = session.pipe, session.config
    edge = StepBoundary(pipe.world_group)
    own_s, idle_s, pipeline_s = [], 0.0, 0.0
    for number in range(_WARM_UP + num_steps):
        pipe.world_group.all_reduce(torch.zeros(1))  # all ranks begin together
        began_s = time.perf_counter()
        refuse_non_finite(session, train_one_step(session))
        pipe.world.device.synchronize()
        took_s = time.perf_counter() - began_s
        told = RankStepInfo(pipe.last_step_times(), 0, origin_s=edge.origin_s)
        overall = summarise_ranks(told.numbers(), pipe.world_group, pipe.world.rank)
        agreed = agree(overall, pipe.world.size)
        edge.leave(time.perf_counter())
        if number >= _WARM_UP:
            own_s.append(took_s)
            idle_s += agreed.bubble * agreed.pipeline_s
            pipeline_s += agreed.pipeline_s
    steps_and_peaks = pipe.world_group.all_gather_object((own_s, pipe.world.device.memory_peak()))
    tokens = config.train.batch_size * (tokens_per_sample(config.data) or 0)
    return {
        "steps_s": [
            max(ranks_s)
            for ranks_s in zip(*(steps_s for steps_s, _ in steps_and_peaks), strict=True)
        ],
        "tokens": tokens,
        "bubble": idle_s / pipeline_s if pipeline_s else 0.0,
        "peak_bytes": [peak for _, peak in steps_and_peaks],
    }


if __name__ == "__main__":
    main()
