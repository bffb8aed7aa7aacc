"""Iterations per second and loss of stale-synchronous training, for several bounds and delays.

    python -m experiments.outer.stale --seconds 20 --bounds 0,1,4,16,none,gossip

Workers and shards are processes of this machine. Workers are delayed in addition to computing.
`random`: a tenth of all iterations, of any worker, are delayed ten times as long; `one`: worker 0
is always delayed three times as long.
"""

import argparse
import multiprocessing
import os
import random
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Listener
from typing import Final, NamedTuple

import torch

from experiments.outer.stale.remote import ADDRESS, RemoteShard, WatchedShard, serve
from experiments.outer.stale.shard import Shard, Values, divided
from experiments.outer.stale.text_model import (
    Text,
    initial_values,
    read_text,
    update_of,
    validation_loss,
)
from experiments.outer.stale.without_bound import AsynchronousShard, GossipShard
from experiments.outer.stale.working import work

_BUSY_S: Final = 0.030
_LOOK_S: Final = 0.5
_FOREVER: Final = 1 << 40


class Setting(NamedTuple):
    """Parameters of one row of the table; `bound` is a number, none or gossip."""

    delays: str
    bound: str
    workers: int
    shards: int
    rate: float


class Progress(NamedTuple):
    """State of the shards: iterations that all workers have finished, and the loss."""

    seconds: float
    iterations: int
    loss: float
    most_ahead: int


def delay_s(delays: str, worker: int, clock: int) -> float:
    """Return the delay of a worker's iteration; deterministic."""
    if delays == "one":
        return _BUSY_S * (3 if worker == 0 else 1)
    chance = random.Random(clock * 1009 + worker).random()
    return _BUSY_S * (10 if chance < 0.1 else 1)


def run(setting: Setting, text: Text, seconds: float) -> list[Progress]:
    """Train for some seconds; return the observed states."""
    context = multiprocessing.get_context("fork")
    values = initial_values()
    parts = list(divided(values, setting.shards))
    key = secrets.token_bytes(32)
    with ExitStack() as stack:
        listeners = [Listener((ADDRESS, 0), authkey=key) for _ in parts]
        processes = [
            context.Process(target=_serve, args=(part, setting, listener), daemon=True)
            for part, listener in zip(parts, listeners, strict=True)
        ]
        ports = [int(listener.address[1]) for listener in listeners]
        processes += [
            context.Process(target=_work, args=(parts, ports, key, setting, worker, text))
            for worker in range(setting.workers)
        ]
        for process in processes:
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
        for listener in listeners:
            listener.close()
        shards = [RemoteShard(port, key, part) for port, part in zip(ports, parts, strict=True)]
        return _watched(shards, text, seconds)


def _serve(part: Values, setting: Setting, listener: Listener) -> None:
    torch.set_num_threads(1)
    serve(_shard(part, setting), listener, setting.workers + 1)


def _shard(part: Values, setting: Setting) -> WatchedShard:
    if setting.bound == "none":
        return AsynchronousShard(part, setting.workers)
    if setting.bound == "gossip":
        return GossipShard(part, setting.workers)
    return Shard(part, setting.workers, int(setting.bound))


def _work(
    parts: Sequence[Values],
    ports: Sequence[int],
    key: bytes,
    setting: Setting,
    worker: int,
    text: Text,
) -> None:
    torch.set_num_threads(1)
    shards = [RemoteShard(port, key, part) for port, part in zip(ports, parts, strict=True)]

    def compute(values: Values, clock: int) -> Values:
        time.sleep(delay_s(setting.delays, worker, clock))
        return update_of(values, text, worker, clock, setting.rate / setting.workers)

    try:
        work(shards, [list(part) for part in parts], worker, range(_FOREVER), compute)
    except (EOFError, ConnectionError):
        os._exit(1)  # the shards have ended


def _watched(shards: Sequence[RemoteShard], text: Text, seconds: float) -> list[Progress]:
    began_s = time.monotonic()
    found: list[Progress] = []
    while not found or found[-1].seconds < seconds:
        time.sleep(_LOOK_S)
        passed_s = time.monotonic() - began_s
        answers = [shard.settled() for shard in shards]
        values = {name: value for _, part in answers for name, value in part.items()}
        iterations = min(facts["iterations"] for facts, _ in answers)
        ahead = max(facts["most_ahead"] for facts, _ in answers)
        found.append(Progress(passed_s, iterations, validation_loss(values, text), ahead))
    return found


def line_of(setting: Setting, moments: Sequence[Progress], common: int) -> str:
    """Return a row of the table; `common` is a number of iterations that every setting reached."""
    last = moments[-1]
    after = next(moment for moment in moments if moment.iterations >= common)
    return (
        f"| {setting.delays} | {setting.bound} | {last.iterations / last.seconds:.1f} | "
        f"{last.most_ahead} | {last.loss:.3f} | {after.loss:.3f} |"
    )


def main() -> None:
    """Run all settings and print the table."""
    parser = argparse.ArgumentParser(prog="python -m experiments.outer.stale")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of training per row")
    parser.add_argument(
        "--bounds",
        default="0,1,4,16,none,gossip",
        help="numbers; none: no worker waits; gossip: pairs of workers average",
    )
    parser.add_argument("--delays", default="random,one")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.5, help="learning rate of gradient descent")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = read_text()
    settings = [
        Setting(delays, bound, args.workers, args.shards, args.rate)
        for delays in args.delays.split(",")
        for bound in args.bounds.split(",")
    ]
    found = [run(setting, text, args.seconds) for setting in settings]
    common = min(moments[-1].iterations for moments in found)
    print(f"loss on held-out text before training: {validation_loss(initial_values(), text):.3f}")
    print(
        "| slow | s | iterations/s | most ahead | "
        f"loss after {args.seconds:g} s | after {common} iterations |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for setting, moments in zip(settings, found, strict=True):
        print(line_of(setting, moments, common))


if __name__ == "__main__":
    main()
