"""What a rank does to start, counted in worlds of 64 to 4,096: it may grow with their logarithm."""

import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from functools import partial, reduce
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from experiments.scale.startup.rank_0 import DEVICES, RankCosts, measure, others_say
from experiments.scale.startup.session import Part, measure_session
from experiments.scale.startup.simulated import join, no_counts
from gpipe_hpc.comm.net.pickling import dumps
from gpipe_hpc.config import compose_config
from gpipe_hpc.data_parallel.buckets import join_runs
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.buffer_sync import _SourceBuffer, _united
from gpipe_hpc.trainer.run.identity import RunIdentity
from gpipe_hpc.trainer.start import layout_choice
from gpipe_hpc.trainer.start.layout_choice import with_layout


@pytest.fixture(scope="module", params=DEVICES)
def found(request) -> dict[int, RankCosts]:
    """Return rank 0 of worlds of several sizes, which does more than any other rank."""
    return {size: measured_apart(size, request.param) for size in (64, 512, 4096)}


@pytest.fixture(scope="module")
def opened() -> dict[int, dict[str, Part]]:
    """Return what opening a run and a copy in a neighbour's memory take rank 0, part by part."""
    return {size: apart(measure_session, size, 4) for size in (64, 512, 4096)}


@pytest.fixture(scope="module")
def sharded() -> dict[int, dict[str, Part]]:
    """Return the same where paces are measured, and copies of a stage divide the optimizer."""
    settings = "pipeline.paces=measured", "outer.shard=flat"
    return {size: apart(measure_session, size, 4, *settings) for size in (64, 512, 4096)}


def measured_apart(size: int, kind: str) -> RankCosts:
    return apart(measure, size, 4, kind)


def apart(measuring, *given):
    """Measure in a process of its own, which has loaded torch already."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def body() -> None:
        try:
            queue.put(measuring(*given))
        except BaseException:
            traceback.print_exc()  # the process ends before its interpreter would
        finally:
            queue.put(None)
            os._exit(0)

    context.Process(target=body, daemon=True).start()
    told = queue.get()
    assert told is not None, f"{measuring.__name__}{given} did not end"
    return told


@pytest.mark.parametrize(
    ("what", "at_64", "each_level"),
    [
        ("keys", 88, 56),
        ("groups", 11, 3),
        ("peers", 57, 27),
        ("collectives", 41, 20),
        ("num_bytes", 10500, 5500),
    ],
)
def test_what_a_rank_does_to_start_grows_with_the_levels(found, what, at_64, each_level):
    """Each rank asked the store for all, formed two full meshes and gathered from all ranks.

    On an accelerator it did so for the copies of its stage until later: 1,023 peers in a world of
    4,096. A level has eight times the ranks: a group for the start, one for the steps and one in
    which rows of the table are handed out, each of eight. A watcher has six more neighbours. The
    copies of a stage, four times fewer than the ranks, are a mesh at 64; then a rank has six more
    of them. Whom it connects with it tells a key, and asks for one. Each group gathers the hosts of
    its ranks. The layout named the micro-batches of each replica: 25,000 bytes in a world of 4,096.
    """
    counts = [getattr(found[size], what) for size in (64, 512, 4096)]
    assert counts[0] <= at_64
    assert all(more - less <= each_level for less, more in itertools.pairwise(counts))


MOST = {
    "compare the settings": Part(3, 0, 8500, 0, 3, 0, 0, 0, 8500),
    "open the copies": Part(8, 0, 500, 0, 10, 2, 0, 0, 500),
    # With the agreement on whether anything is trained (`opening._refuse_frozen`).
    "open the session": Part(42, 19, 7000, 7500, 50, 42, 0, 0, 13000),
    "check before the run": Part(12, 0, 2500, 0, 3, 0, 0, 0, 2500),
    "copy to a neighbour": Part(9, 0, 60, 0, 3, 0, 2, 4000, 60),
}
"""In a world of 64; a few keys are those of the watcher, which come when they come."""
EACH_LEVEL = {
    "compare the settings": Part(2, 0, 6000, 0, 3, 0, 0, 0, 6000),
    "open the copies": Part(5, 0, 350, 0, 3, 0, 0, 0, 350),
    "open the session": Part(26, 8, 4400, 2600, 30, 22, 0, 0, 7500),
    "check before the run": Part(8, 0, 1500, 0, 3, 0, 0, 0, 1500),
    "copy to a neighbour": Part(6, 0, 40, 0, 3, 0, 0, 128, 40),
}
"""More for eight times as many ranks."""


@pytest.mark.parametrize("part", MOST)
def test_what_opening_a_run_takes_grows_with_the_levels(opened, part):
    """Copies in memory had each rank hear of the host and of the size of every other's state."""
    small, *_ = counts = [opened[size][part] for size in (64, 512, 4096)]
    assert all(own <= most for own, most in zip(small, MOST[part], strict=True)), small
    for less, more in itertools.pairwise(counts):
        growth = Part(*(after - before for before, after in zip(less, more, strict=True)))
        assert all(g <= most for g, most in zip(growth, EACH_LEVEL[part], strict=True)), growth


def test_what_copies_hear_of_shards_to_save_them_grows_with_the_levels(sharded):
    """Each heard which parts of parameters every other copy of its stage holds: 1.4 MB at 4,096."""
    small, *_ = found = [each["save a checkpoint"] for each in sharded.values()]
    assert small.of_groups <= 25 and small.heard_bytes <= 1900
    for less, more in itertools.pairwise(found):
        assert more.of_groups - less.of_groups <= 21
        assert more.heard_bytes - less.heard_bytes <= 1100
        assert (more.keys, more.peers) == (less.keys, less.peers)


def test_rank_0_hears_a_few_bytes_of_each_rank_to_save(opened):
    """It heard all names of each: of a stage with twelve blocks of a GPT 26 kB, 107 MB at 4,096."""
    for size, parts in opened.items():
        assert parts["save a checkpoint"].bytes_of_groups <= 8000 + 32 * size


def test_what_ranks_hear_of_paces_grows_with_the_levels(sharded):
    """Each heard of the pace of every other: 37 kB at 4,096."""
    small, *_ = found = [each["open the session"].heard_bytes for each in sharded.values()]
    assert small <= 13_500
    assert all(more - less <= 7500 for less, more in itertools.pairwise(found))


def heard_of_a_choice(size: int, settings: Sequence[str]) -> int:
    """Return what choosing a layout brings to all ranks alike, where each has a pace of its own."""
    counts = no_counts()
    world, _ = join(0, size, counts, partial(others_say, 4), HostDevice())
    heard = sum(counts.heard.values())
    pipeline = {"replicas": size // 4, "stages": 4, "paces": [1.0, 2.0] * (size // 2)}
    text = "\n".join(f"rank {rank}" for rank in range(size))
    found = layout_choice._BestLayout({"pipeline": pipeline, "outer": {}}, text)
    with patch.object(layout_choice, "_choose", lambda *_: found):
        config = compose_config(["model=mlp", "data=synthetic_vectors", *settings])
        with_layout(config, world, RunIdentity(Path("nowhere"), "run", False), settings)
    return sum(counts.heard.values()) - heard


def test_what_ranks_hear_of_a_layout_that_is_chosen_grows_with_the_levels():
    """Each heard of the pace of every other, and what rank 0 says of all."""
    settings = ["pipeline.layout=auto", "train.batch_size=16384"]
    small, *_ = found = [apart(heard_of_a_choice, size, settings) for size in (64, 512, 4096)]
    assert small <= 1500
    assert all(more - less <= 800 for less, more in itertools.pairwise(found))


SIZES = (64, 512, 4096, 16_384)


def test_what_copies_hear_of_hosts_grows_with_the_hosts():
    """Each heard of every other copy on which host it is, in some sixty bytes."""
    for size in SIZES:
        told = [[(f"{i // 8:016x}", 1)] for i in range(size)]
        assert len(dumps(reduce(join_runs, told), "hosts")) < 100 + 40 * size // 8


def test_what_holders_hear_of_unusual_buffers_stays():
    """Each heard the values of every other holder."""
    kind = (4,), torch.float32, torch.strided
    found = []
    for size in SIZES:
        told = [
            {"layers.0.last": _SourceBuffer(i or -1, i, kind, True, True, True)}
            for i in range(size)
        ]
        merged = reduce(_united, told)
        assert merged == told[0]
        found.append(len(dumps(merged, "offers")))
    assert found == found[:1] * len(SIZES)


def test_a_world_of_thousands_costs_a_rank_little_memory(found):
    """What is left to grow are the entries of torch's default group, 1.5 kB for each rank."""
    most_mb = found[64].joined_mb + found[64].built_mb + 4032 * 2.5e-3 + 4
    assert found[4096].joined_mb + found[4096].built_mb < most_mb


@pytest.mark.slow
def test_real_ranks_start_and_tell_what_they_keep_open(repository, tmp_path):
    """The command itself, with the fewest ranks."""
    subprocess.run(
        [sys.executable, "-c", _FEW, str(tmp_path)],
        check=True,
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository)},
    )
    rows = json.loads((tmp_path / "startup.json").read_text())
    ranks = rows["real"]["4"]
    assert len(ranks) == 4
    for rank in ranks:
        assert 0 < rank["joined_s"] <= rank["built_s"] <= rank["stepped_s"]
        assert 0 < rank["sockets"] < rank["files"] < 100
    assert "| 64 |" in (tmp_path / "startup.md").read_text()


_FEW = """
import sys
from experiments.scale.startup import __main__ as command
command.SIMULATED = (64,)
sys.argv = ["startup", "--most-ranks", "4", "--out", sys.argv[1]]
command.main()
"""
