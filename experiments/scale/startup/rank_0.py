"""Join a large world as its rank 0, with all other ranks simulated, and build a small model.

    python -m experiments.scale.startup.rank_0 16384 4 cpu           # ranks, stages, device
    python -m experiments.scale.startup.rank_0 16384 4 accelerator   # a stand-in

Prints one line of JSON. No rank does more than rank 0: it is in a group of every level, and decides
the layout.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from experiments.scale.startup.ranks import layers, mean_square
from experiments.scale.startup.simulated import StandIn, join, no_counts
from gpipe_hpc import Pipeline
from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.assembly import ParameterInfo


class RankCosts(NamedTuple):
    """Costs of one rank: seconds and megabytes until it has joined, and then for its model.

    Args:
        keys: keys of the store that it reads or writes
        groups: groups of torch that it forms
        peers: ranks with which Gloo connects it; some count twice
        copies: replicas of its stage
        collectives: number of collectives
        num_bytes: bytes that it contributes to collectives
    """

    size: int
    device: str
    joined_s: float
    joined_mb: float
    built_s: float
    built_mb: float
    keys: int
    groups: int
    peers: int
    copies: int
    collectives: int
    num_bytes: int


DEVICES: Final = ("cpu", "accelerator")


def measure(size: int, stages: int, kind: str) -> RankCosts:
    """Join and build once in this process, as rank 0."""
    torch.set_num_threads(1)
    counts = no_counts()
    before_mb = _resident_mb()
    device: Any = HostDevice() if kind == "cpu" else StandIn()
    world, joined_s = join(0, size, counts, partial(others_say, stages), device)
    joined_mb = _resident_mb() - before_mb
    began_s = time.perf_counter()
    pipe = Pipeline(
        layers(stages),
        mean_square,
        stages=stages,
        replicas=size // stages,
        microbatches=4,
        partition="uniform",
        schedule="gpipe",
        world=world,
    )
    built_s = time.perf_counter() - began_s
    copies = pipe.sharers(0).size
    groups = counts.groups
    return RankCosts(
        size,
        kind,
        joined_s,
        joined_mb,
        built_s,
        _resident_mb() - before_mb - joined_mb,
        len(counts.asked | counts.told),
        len(groups),
        sum(groups) - len(groups) + len(counts.pairs),
        copies,
        sum(counts.collectives.values()),
        sum(counts.num_bytes.values()),
    )


def others_say(stages: int, secret: Secret, value: Any, ranks: Sequence[int]) -> Sequence[Any]:
    """Return the values of simulated ranks: their proofs, parameters of their stage, or copies."""
    match value:
        case (bytes(), *rest):
            return [(secret.prove(f"rank {rank}"), *rest) for rank in ranks]
        case [(int(), int(), ParameterInfo()), *_]:
            return [[_of_stage(stage, *each) for each in value] for stage in range(stages)]
    return [value] * len(ranks)


def _of_stage(
    stage: int, own: int, position: int, info: ParameterInfo
) -> tuple[int, int, ParameterInfo]:
    """Return the name of the corresponding parameter in a stage's layer."""
    name = info.name.replace(f"layers.{own}.", f"layers.{stage}.")
    return stage, position, info._replace(name=name, stage=stage)


def _resident_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (resident,) = (line for line in lines if line.startswith("VmRSS"))
    return int(resident.split()[1]) / 1e3


if __name__ == "__main__":
    size, stages, kind = sys.argv[1:]
    print(json.dumps(measure(int(size), int(stages), kind)._asdict()), flush=True)
    os._exit(0)  # no other rank takes part in a shutdown
