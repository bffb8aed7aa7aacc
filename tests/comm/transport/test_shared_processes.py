"""Channels in shared memory between two real processes."""

import contextlib
import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch

from gpipe_hpc.comm.transport.base import PlacedChannel
from gpipe_hpc.comm.world.processes import ProcessWorld
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.schedule import Channel
from tests.support import resident_bytes

FORWARD = PlacedChannel(Channel(0, 1, 0), source_rank=0, destination_rank=1, tag=0)
BACKWARD = PlacedChannel(Channel(1, 0, 0), source_rank=1, destination_rank=0, tag=1)


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
    world = ProcessWorld(HostDevice(), timeout_s)
    transport = world.transport([FORWARD, BACKWARD])
    try:
        return body(rank, transport, world)
    except (ConnectionError, TimeoutError) as error:
        return f"{type(error).__name__} after {time.monotonic():.3f}: {error}"


def test_dozens_of_steps_grow_neither_memory_nor_descriptors(tmp_path):
    """Sizes change from step to step; a slot of 4 MB that leaked once a step would make 240 MB."""

    def body(rank, transport, world):
        mine, theirs = (FORWARD, BACKWARD)[:: 1 - 2 * rank]
        measured = []
        for step in range(81):
            for microbatch in range(4):
                size = 1_000_000 - 10_000 * ((step + microbatch) % 7)
                transport.send(mine, "training", microbatch, torch.ones(size), 2)
            for microbatch in range(4):
                assert transport.wait(theirs, "training", microbatch).nest[-1] == 1
            transport.finish()
            if step in (20, 80):
                measured += [resident_bytes(), len(os.listdir("/proc/self/fd"))]
        return measured

    for memory, descriptors, more_memory, more_descriptors in fork_two(tmp_path, body):
        assert more_memory - memory < 30e6
        assert more_descriptors == descriptors


def nest_of(number, draw):
    """Return a message whose every element is its number."""
    shapes = [(), (3,), (33, 31), (1000,), (0, 2), (300, 301)]
    made = [
        torch.full(draw.choice(shapes), float(number), requires_grad=draw.random() < 0.5)
        for _ in range(draw.choice((1, 1, 1, 3)))
    ]
    return made[0] if len(made) == 1 else {"several": made}


def holds(number, nest, draw):
    """Return a check, to be made later, that the message has not been written over."""
    tensors = [nest] if isinstance(nest, torch.Tensor) else nest["several"]
    kept = draw.choice(tensors)
    how = draw.randrange(3)
    if how == 0:
        return lambda: bool((kept == number).all())
    if how == 1:
        view = kept.detach().view(-1)[1:]
        return lambda: bool((view == number).all())
    weight = torch.ones(kept.shape, requires_grad=True)
    total = (weight * kept).sum()  # autograd alone keeps the message
    return lambda: bool((torch.autograd.grad(total, weight)[0] == number).all())


def test_nothing_is_written_over_while_anything_of_it_is_held(tmp_path):
    """Both ways at once; sizes change; each message is held for a time of its own."""

    def body(rank, transport, world):
        mine, theirs = (FORWARD, BACKWARD)[:: 1 - 2 * rank]
        draw, held, num_wrong, most = random.Random(rank), [], 0, 0
        with ThreadPoolExecutor(1) as other:
            for start in range(0, 2000, 20):
                for number in range(start, start + 20):
                    transport.send(mine, "training", number, nest_of(number, draw), 1)
                for number in range(start, start + 20):
                    nest = transport.wait(theirs, "training", number).nest
                    held.append(holds(number, nest, draw))
                    del nest
                    most = max(most, len(held))
                    while len(held) > draw.randrange(60):
                        check = held.pop(draw.randrange(len(held)))
                        num_wrong += not check()
                        if draw.random() < 0.3:
                            other.submit(id, check)  # dies on another thread
                        del check
                transport.finish()
            num_wrong += sum(not check() for check in held)
        slots = transport._routes[mine]._senders[mine]._pool._num_made
        return [num_wrong, most, slots]

    answers = fork_two(tmp_path, body)
    for num_wrong, most, num_slots in answers:
        assert num_wrong == 0 and most > 20
        assert num_slots < 1000, "hardly any was used again: the test shows nothing"


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
