"""Real small ranks on this machine: processes that join, create their groups and build a model.

They are forked from a process that has imported torch, so times do not include the import.
"""

import json
import os
import resource
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.comm.world.start import start_world

STAGES = 4
WIDTH = 8


class Rank(NamedTuple):
    """Costs of one rank: seconds since the first one was forked, and its CPU seconds.

    Args:
        files: open descriptors after the model is built
        sockets: those that are sockets
        private_mb: memory that is not shared with other processes
    """

    joined_s: float
    built_s: float
    stepped_s: float
    cpu_s: float
    files: int
    sockets: int
    threads: int
    private_mb: float


def layers(number: int = STAGES) -> list[LayerSpec]:
    """Return a small model."""
    return [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(number)]


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of a micro-batch."""
    return (output - target).square().mean()


def run(num_ranks: int) -> list[Rank]:
    """Start ranks, run one step on each, and return their measurements."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        children = [
            _fork(rank, num_ranks, port, began_s, Path(folder)) for rank in range(num_ranks)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            raise SystemExit(f"startup: expected every rank to end well, got {codes}")
        texts = [(Path(folder) / str(rank)).read_text() for rank in range(num_ranks)]
        return [Rank(*json.loads(text)) for text in texts]


def _fork(rank: int, num_ranks: int, port: int, began_s: float, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for name, value in {
            "RANK": rank,
            "WORLD_SIZE": num_ranks,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": num_ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }.items():
            os.environ[name] = str(value)
        torch.set_num_threads(1)
        (folder / str(rank)).write_text(json.dumps(_be(began_s)))
        code = 0
    finally:
        os._exit(code)


def _be(began_s: float) -> Rank:
    world = start_world(device="cpu", silence_s=120.0)
    joined_s = time.monotonic() - began_s
    pipe = Pipeline(
        layers(),
        mean_square,
        stages=STAGES,
        replicas=world.size // STAGES,
        microbatches=4,
        partition="uniform",
        schedule="gpipe",
        world=world,
    )
    built_s = time.monotonic() - began_s
    files = os.listdir("/proc/self/fd")
    num_sockets = sum(_is_socket(file) for file in files)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = used.ru_utime + used.ru_stime
    data = torch.zeros(4 * world.size, WIDTH)
    part = pipe.share(len(data))
    pipe.step(data[part], data[part])
    stepped_s = time.monotonic() - began_s
    world.world_group.all_gather_object("measured")
    return Rank(
        joined_s,
        built_s,
        stepped_s,
        cpu_s,
        len(files),
        num_sockets,
        len(os.listdir("/proc/self/task")),
        _private_mb(),
    )


def _is_socket(descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except OSError:
        return False


def _private_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1e3


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def check_alone() -> None:
    """Raise if the process to fork has threads."""
    assert threading.active_count() == 1, "ranks are forked before any thread is started"
