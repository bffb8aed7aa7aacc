"""The same preflight by torchrun and by mpiexec: what they say, and what they leave."""

import re

import pytest

from gpipe_hpc.planner.cluster_file import read_cluster

TINY = ("model.num_layers=4", "model.width=16", "model.num_heads=2", "data=synthetic")
MODULE = "gpipe_hpc.preflight"

pytestmark = pytest.mark.slow


def lines(output):
    """Return what was said without numbers, spaces and what a busy machine adds."""
    lines = (re.sub(r"[+±]?[\d.,]+( ?([num]?s|[kMGT]?B)\b(/s)?)?", "#", each) for each in output)
    lines = (re.sub(r"[\s=]+", " ", each).strip() for each in lines)
    busy = re.compile(r"$|warning: |all fine|fit, with")
    return [each for each in lines if not busy.match(each)]


def test_each_launcher_comes_to_the_same_verdict(torchrun, mpiexec, tmp_path, repository):
    """torchrun adds its own words, and its own code, 1, for the 3 of ranks that are not fit."""
    words = [*TINY, "model.width=400000", f"run.dir={tmp_path}/run"]
    files = {name: tmp_path / f"{name}.yaml" for name in ("torchrun", "mpiexec")}
    out = {name: f"preflight.out={path}" for name, path in files.items()}
    launch = ("--standalone", "--nproc_per_node=2")
    env = {"PYTHONPATH": str(repository)}
    by_torchrun = torchrun(launch, *words, out["torchrun"], env=env, module=MODULE)
    assert by_torchrun.wait() == 1, by_torchrun.output
    assert "exitcode  : 3 " in by_torchrun.output, by_torchrun.output
    ended = mpiexec(2, "-m", MODULE, *words, out["mpiexec"], folder=tmp_path)
    assert ended.code == 3, ended.output
    assert "not fit: memory of" in ended.output
    said = by_torchrun.output.replace(str(files["torchrun"]), str(files["mpiexec"]))
    found = lines(ended.output.splitlines())
    assert len(found) >= 8, ended.output
    assert [each for each in found if each not in lines(said.splitlines())] == []
    one, other = (read_cluster(path) for path in files.values())
    assert one.hosts == other.hosts == (2,)
    assert one.within.bandwidth > 0 < other.within.bandwidth
