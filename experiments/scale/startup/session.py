"""Open a run as rank 0 of a large world, copy its state to a neighbour's memory, and save.

    python -m experiments.scale.startup.session 4096 4                       # ranks, stages
    python -m experiments.scale.startup.session 4096 4 outer.shard=flat      # and settings

Prints one line of JSON per part: the traffic of rank 0, which is the largest of all ranks.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from experiments.scale.startup.rank_0 import others_say
from experiments.scale.startup.simulated import Counts, SimulatedWorld, join, no_counts
from gpipe_hpc import LayerSpec
from gpipe_hpc.checkpoint.in_memory import open_copies
from gpipe_hpc.checkpoint.in_memory.search import MissingCopies
from gpipe_hpc.checkpoint.parts import StateCheck
from gpipe_hpc.checkpoint.rank_reports import RankReport
from gpipe_hpc.comm.collectives.tree_group import TreeGroup
from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.watchdog import heartbeat
from gpipe_hpc.config import compose_config
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.preflight.rank_checks import check_before_run
from gpipe_hpc.preflight.settings import check_settings
from gpipe_hpc.trainer.run.identity import RunIdentity
from gpipe_hpc.trainer.start import open_session

_WIDTH: Final = 10


class Part(NamedTuple):
    """Costs of one part of a start.

    `of_all` counts collectives of all ranks, including those by levels; `of_groups` counts others.
    `bytes_of_all` and `bytes_of_groups` are the bytes that this rank contributed. `keys` counts
    keys of the store, `peers` the ranks that Gloo connects, `messages` and `message_bytes`
    point-to-point messages. `heard_bytes` are the bytes that collectives delivered to all ranks.
    """

    of_all: int
    of_groups: int
    bytes_of_all: int
    bytes_of_groups: int
    keys: int
    peers: int
    messages: int
    message_bytes: int
    heard_bytes: int


def model(stages: int) -> list[LayerSpec]:
    """Return a small model with one layer per stage."""
    return [LayerSpec(nn.Linear, _WIDTH, _WIDTH) for _ in range(stages)]


def measure_session(size: int, stages: int, *settings: str) -> dict[str, Part]:
    """Return the costs of opening and saving, part by part, in this process as rank 0."""
    torch.set_num_threads(1)
    counts = no_counts()
    world, _ = join(0, size, counts, partial(_say, stages), HostDevice())
    parts: dict[str, Part] = {}
    seen = [_now(world, counts)]

    # Ranks synchronize once a second while data are opened; the count would depend on the load.
    without_deadline = patch.object(heartbeat, "_MEET_EVERY_S", 600.0)

    def done(name: str) -> None:
        seen.append(_now(world, counts))
        parts[name] = Part(*(now - then for now, then in zip(seen[-1], seen[-2], strict=True)))

    with tempfile.TemporaryDirectory() as folder, without_deadline:
        config = compose_config([*_settings(size, stages, folder), *settings])
        check_settings(world, config)
        done("compare the settings")
        run = RunIdentity(Path(folder) / "run", "the_run", False, lineage="a")
        (run.folder / "checkpoints").mkdir(parents=True)
        copies = open_copies(world, Path(folder), run.name, {"lineage": "a", "layout": "one"})
        done("open the copies")
        session = open_session(config, world, run, None, copies)
        done("open the session")
        check_before_run(config, world, session.planned)
        done("check before the run")
        session.copy()
        done("copy to a neighbour")
        step_on_nothing(session.optimizer)
        seen[-1] = _now(world, counts)
        session.pipe.save(Path(folder) / "saved", session.optimizer)
        done("save a checkpoint")
        session.close()
        copies.remove()
    return parts


def step_on_nothing(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer create its states without a step of the pipeline."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def _settings(size: int, stages: int, folder: str) -> list[str]:
    return [
        "model._target_=experiments.scale.startup.session.model",
        f"+model.stages={stages}",
        "data=synthetic_vectors",
        f"data.width={_WIDTH}",
        f"data.num_samples={4 * size}",
        f"train.batch_size={size}",
        "train.steps=4",
        f"pipeline.stages={stages}",
        f"pipeline.replicas={size // stages}",
        "pipeline.microbatches=4",
        "pipeline.partition=uniform",
        f"run.dir={folder}/run",
        "checkpoint.neighbour_every=1",
        f"checkpoint.neighbour_dir={folder}",
    ]


def _say(stages: int, secret: Secret, value: Any, ranks: Sequence[int]) -> Sequence[Any]:
    """Return the values of simulated ranks, equal to this rank's unless they describe a rank.

    The rank after this one returns the number that cancels this rank's. Ranks of other replicas
    have to write what those of the first have.
    """
    match value:
        case RankReport() | [RankReport(), *_]:
            alike = RankReport({}, 0, None, None, {})
            others = alike if isinstance(value, RankReport) else [alike] * len(value)
            return [value if rank < stages else others for rank in ranks]
        case StateCheck(number=number):
            return [value, StateCheck(-number), *(StateCheck() for _ in ranks[2:])]
        case MissingCopies(first=first, stop=stop):
            return [MissingCopies(first + rank, stop + rank, value.runs) for rank in ranks]
    return others_say(stages, secret, value, ranks)


def _now(world: SimulatedWorld, counts: Counts) -> Part:
    everybody = world.world_group
    levels: Sequence[Any] = everybody.groups if isinstance(everybody, TreeGroup) else (everybody,)
    of_all = sum(group.num_calls for group in levels)
    bytes_of_all = sum(group.num_bytes for group in levels)
    return Part(
        of_all,
        sum(counts.collectives.values()) - of_all,
        bytes_of_all,
        sum(counts.num_bytes.values()) - bytes_of_all,
        len(counts.asked | counts.told),
        sum(counts.groups) - len(counts.groups) + len(counts.pairs),
        counts.messages["sent"],
        counts.messages["bytes"],
        sum(counts.heard.values()),
    )


if __name__ == "__main__":
    size, stages, *settings = sys.argv[1:]
    for name, part in measure_session(int(size), int(stages), *settings).items():
        print(json.dumps({"part": name, **part._asdict()}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # no other rank takes part in a shutdown
