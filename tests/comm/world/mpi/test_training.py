"""`python -m gpipe_hpc.train` under a real mpiexec: the run of other launchers, to the bit."""

import re
import shutil

import pytest

from tests.support import losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = ("-m", "gpipe_hpc.train")
MPI = ("comm.backend=mpi", "comm.shared_memory=false")


@pytest.fixture
def model(tiny):
    return (*tiny, "train.steps=5", "model.num_layers=2", "model.dropout=0.1")


def test_five_steps_are_those_over_gloo_and_of_one_process(
    mpiexec, start_ranks, start, same_end, model, tmp_path
):
    words = (*model, "pipeline.stages=4")
    gloo = start_ranks(4, *words, "run.dir=gloo")
    alone = start(*model, "run.dir=alone")
    ended = mpiexec(4, *TRAIN, *words, *MPI, "run.dir=mpi", folder=tmp_path)
    assert ended.code == 0, ended.output
    assert gloo.wait(120).codes == [0] * 4, gloo.outputs
    assert alone.wait(120).code == 0, alone.output
    assert len(losses(tmp_path / "mpi")) == 5
    for other in ("gloo", "alone"):
        same_end(tmp_path / "mpi", tmp_path / other)


def test_a_run_that_stops_goes_on_on_two_ranks_over_mpi_and_over_gloo(
    mpiexec, start_ranks, same_end, model, tmp_path
):
    """Sums of two replicas have one order, so its bits stay those of a run that never stopped."""
    model = (*model, "pipeline.replicas=2")
    whole = start_ranks(4, *model, "run.dir=whole")
    words = (*model, *MPI, "run.dir=on")
    ended = mpiexec(4, *TRAIN, *words, "train.stop_at=3", folder=tmp_path)
    assert ended.code == 0, ended.output
    assert whole.wait(120).codes == [0] * 4, whole.outputs
    shutil.copytree(tmp_path / "on", tmp_path / "on_gloo")
    gloo = start_ranks(2, *model, "run.dir=on_gloo")
    ended = mpiexec(2, *TRAIN, *words, folder=tmp_path)
    assert ended.code == 0, ended.output
    assert gloo.wait(120).codes == [0, 0], gloo.outputs
    for run, said in (("on", ended.output), ("on_gloo", gloo.outputs[0])):
        assert re.search("resumed from .*: 3 steps done", said)
        same_end(tmp_path / run, tmp_path / "whole")
