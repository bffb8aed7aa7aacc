"""Ranks of one machine compute on cores of their own, and say so."""

import json
import os

import pytest

from gpipe_hpc.device.cores.machine import cores_with, parse_cpus

pytestmark = pytest.mark.slow


def ranks_of(folder):
    return json.loads((folder / "summary.json").read_text())["ranks"]


def losses_of(folder):
    return [json.loads(line).get("loss") for line in (folder / "metrics.jsonl").open()]


def test_two_ranks_take_the_cores_in_halves_and_train_the_same(train, tiny, tmp_path):
    """Bound, they computed what they compute on all CPUs together."""
    given = os.sched_getaffinity(0)
    settings = (*tiny, "train.steps=3")
    output = train(2, *settings, "run.dir=run")
    first, second = (parse_cpus(rank["cpus"]) for rank in ranks_of(tmp_path / "run"))
    if len(cores_with(given)) > 1:
        assert first | second == given and not first & second
        assert "2 ranks bound to CPUs" in output
    else:
        assert first == second == given and "more ranks than cores" in output
    assert [rank["num_threads"] for rank in ranks_of(tmp_path / "run")] == [1, 1]
    assert "by OMP_NUM_THREADS" in output
    output = train(2, *settings, "run.dir=loose", "train.bind=none")
    assert "not bound: train.bind=none" in output
    assert all(parse_cpus(rank["cpus"]) == given for rank in ranks_of(tmp_path / "loose"))
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "loose")


def test_torchruns_own_thread_is_not_taken_for_a_wish(torchrun, environ, tiny):
    """torchrun sets OMP_NUM_THREADS=1 where nobody did, which kept each rank to a core of many."""
    del environ["OMP_NUM_THREADS"]
    flags = ("--standalone", "--nproc_per_node=2")
    launch = torchrun(flags, *tiny, "train.steps=1", "run.dir=run")
    assert launch.wait() == 0, launch.output
    assert "one per core of the rank with the fewest cores" in launch.output
