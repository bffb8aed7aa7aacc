"""Channels in shared memory between two real processes."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from gpipe_hpc.comm.processes import ProcessWorld
from gpipe_hpc.comm.transport import PlacedChannel
from gpipe_hpc.schedule import Channel

FORWARD = PlacedChannel(Channel(0, 1, 0), source_rank=0, destination_rank=1, tag=0)
BACKWARD = PlacedChannel(Channel(1, 0, 0), source_rank=1, destination_rank=0, tag=1)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def fork_two(folder, body, timeout_s=30.0, waits=True):
    """Fork two ranks of a Gloo group; return their pids, or once they have ended their answers."""
    pids, answers = [], []
    for rank in range(2):
        source, destination = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                os.close(source)
                os.write(destination, json.dumps(run_rank(folder, rank, body, timeout_s)).encode())
                code = 0
            os._exit(code)
        os.close(destination)
        pids.append(pid)
        answers.append(source)
    return SimpleNamespace(pids=pids, answers=answers) if not waits else collect(pids, answers)


def collect(pids, answers):
    """Return what each answered, None for one that was killed."""
    values = []
    for pid, answer in zip(pids, answers, strict=True):
        with os.fdopen(answer, "rb") as stream:
            text = stream.read()
        os.waitpid(pid, 0)
        values.append(json.loads(text) if text else None)
    return values


def run_rank(folder, rank, body, timeout_s):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    world = ProcessWorld(torch.device("cpu"), timeout_s)
    transport = world.transport([FORWARD, BACKWARD])
    try:
        return body(rank, transport, world)
    except (ConnectionError, TimeoutError) as error:
        return f"{type(error).__name__} after {time.monotonic():.3f}: {error}"


def test_two_hundred_steps_grow_neither_memory_nor_descriptors(tmp_path):
    """Sizes change from step to step; a slot of 4 MB that leaked once a step would make 800 MB."""

    def body(rank, transport, world):
        mine, theirs = (FORWARD, BACKWARD)[:: 1 - 2 * rank]
        measured = []
        for step in range(221):
            for microbatch in range(4):
                size = 1_000_000 - 10_000 * ((step + microbatch) % 7)
                transport.send(mine, "training", microbatch, torch.ones(size), 2)
            for microbatch in range(4):
                assert transport.wait(theirs, "training", microbatch).nest[-1] == 1
            transport.finish()
            if step in (20, 220):
                measured += [resident_bytes(), len(os.listdir("/proc/self/fd"))]
        return measured

    for memory, descriptors, more_memory, more_descriptors in fork_two(tmp_path, body):
        assert more_memory - memory < 30e6
        assert more_descriptors == descriptors


def test_a_killed_process_is_noticed_at_once(tmp_path):
    """By the end of file, not by the timeout of a minute."""

    def body(rank, transport, world):
        if rank == 0:
            transport.send(FORWARD, "training", 0, torch.ones(3), 1)
            time.sleep(60)
        transport.wait(FORWARD, "training", 0)
        Path(tmp_path / "received").touch()
        transport.wait(FORWARD, "training", 1)

    shared_before = set(os.listdir("/dev/shm"))
    ranks = fork_two(tmp_path, body, timeout_s=60.0, waits=False)
    deadline = time.monotonic() + 30
    while not (tmp_path / "received").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    killed = time.monotonic()
    os.kill(ranks.pids[0], signal.SIGKILL)
    _, text = collect(ranks.pids, ranks.answers)
    assert "ConnectionError" in text and "lost rank 0" in text
    assert float(text.split("after ")[1].split(":")[0]) - killed < 20
    assert set(os.listdir("/dev/shm")) <= shared_before
