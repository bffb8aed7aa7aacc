"""The same preflight by torchrun and by mpiexec: what they say, and what they leave."""

import re

import pytest

from gpipe_hpc.planning.cluster_file import read_cluster

TINY = ("model.num_layers=4", "model.width=16", "model.num_heads=2", "data=synthetic")
MODULE = "gpipe_hpc.preflight"

pytestmark = pytest.mark.slow


def lines(output):
    """Return what was said without numbers, spaces and what a busy machine adds."""
    lines = (re.sub(r"[+±]?[\d.,]+( ?([num]?s|[kMGT]?B)\b(/s)?)?", "#", each) for each in output)
    lines = (re.sub(r"[\s=]+", " ", each).strip() for each in lines)
    busy = re.compile(r"$|warning: |all fine|fit, with")
    return [each for each in lines if not busy.match(each)]


@pytest.mark.parametrize(
    ("words", "code", "verdict"),
    [
        ((), 0, "what links the ranks"),
        (("model.width=400000",), 3, "not fit: memory of"),
    ],
    ids=["fit", "unfit"],
)
def test_each_launcher_comes_to_the_same_verdict(
    torchrun, mpiexec, tmp_path, repository, words, code, verdict
):
    """torchrun adds its own words, and its own code for any that is not 0."""
    words = [*TINY, "preflight.bytes=10kB", *words]
    files = {name: tmp_path / f"{name}.yaml" for name in ("torchrun", "mpiexec")}
    env = {"PYTHONPATH": str(repository)}
    own = [f"preflight.out={files['torchrun']}", f"run.dir={tmp_path}/run"]
    by_torchrun = torchrun(
        ("--standalone", "--nproc_per_node=2"), *words, *own, env=env, module=MODULE
    )
    assert by_torchrun.wait() == (1 if code else 0), by_torchrun.output
    own = [f"preflight.out={files['mpiexec']}", f"run.dir={tmp_path}/run"]
    ended = mpiexec(2, "-m", MODULE, *words, *own, folder=tmp_path)
    assert ended.code == code, ended.output
    assert verdict in ended.output
    said = by_torchrun.output.replace(str(files["torchrun"]), str(files["mpiexec"]))
    assert f"exitcode  : {code} " in said or code == 0, said
    found = lines(ended.output.splitlines())
    assert len(found) >= 8, ended.output
    assert [each for each in found if each not in lines(said.splitlines())] == []
    one, other = (read_cluster(path) for path in files.values())
    assert one.hosts == other.hosts == (2,)
    assert one.within.bandwidth > 0 < other.within.bandwidth
