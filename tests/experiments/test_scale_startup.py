"""What a rank does to start, counted in worlds of 64 to 4,096: it may grow with their logarithm."""

import itertools
import json
import multiprocessing
import os
import subprocess
import sys

import pytest

from experiments.scale.startup.one import DEVICES, One, measure


@pytest.fixture(scope="module", params=DEVICES)
def found(request) -> dict[int, One]:
    """Return rank 0 of worlds of several sizes, which does more than any other rank."""
    return {size: measured_apart(size, request.param) for size in (64, 512, 4096)}


def measured_apart(size: int, kind: str) -> One:
    """Measure in a process of its own, which has loaded torch already."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def body() -> None:
        try:
            queue.put(tuple(measure(size, 4, kind)))
        finally:
            queue.put(None)  # what fails says so on stderr
            os._exit(0)

    context.Process(target=body, daemon=True).start()
    told = queue.get()
    assert told is not None, f"rank 0 of {size} did not start"
    return One(*told)


@pytest.mark.parametrize(
    ("what", "at_64", "each_level"),
    [
        ("keys", 88, 56),
        ("groups", 11, 3),
        ("peers", 57, 27),
        ("collectives", 36, 18),
        ("num_bytes", 8500, 5500),
    ],
)
def test_what_a_rank_does_to_start_grows_with_the_levels(found, what, at_64, each_level):
    """Each rank asked the store for all, formed two full meshes and gathered from all ranks.

    On an accelerator it did so for the copies of its stage until later: 1,023 peers in a world of
    4,096. A level has eight times the ranks: a group for the start, one for the steps and one in
    which rows of the table are handed out, each of eight. A watcher has six more neighbours. The
    copies of a stage, four times fewer than the ranks, are a mesh at 64; then a rank has six more
    of them. Whom it connects with it tells a key, and asks for one. The layout named the
    micro-batches of each replica: 25,000 bytes in a world of 4,096.
    """
    counts = [getattr(found[size], what) for size in (64, 512, 4096)]
    assert counts[0] <= at_64
    assert all(more - less <= each_level for less, more in itertools.pairwise(counts))


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
command.PLAYED = (64,)
sys.argv = ["startup", "--most-ranks", "4", "--out", sys.argv[1]]
command.main()
"""
