"""Ranks as processes know each other by the job's secret, and take nothing else from sockets."""

import os
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.comm import processes as processes_module
from gpipe_hpc.comm.start import start_world
from gpipe_hpc.comm.wire import Structure
from gpipe_hpc.errors import DataError, GpipeError, LaunchError


@pytest.mark.parametrize("lacks", [False, True], ids=["another", "none"])
def test_ranks_of_a_group_with_unequal_secrets_all_refuse(processes, tmp_path, monkeypatch, lacks):
    """A group that the user started: one rank's environment has another secret, or none."""

    def body(rank):
        monkeypatch.setenv("GPIPE_HPC_SECRET", f"the secret of rank {rank != 1:d} and more")
        if rank == 1 and lacks:
            monkeypatch.delenv("GPIPE_HPC_SECRET")
        with pytest.raises(LaunchError) as caught:
            start_world()
        return str(caught.value)

    zero, one, two = processes(3, body, tmp_path)
    assert "from GPIPE_HPC_SECRET, got another or none on rank 1;" in zero
    assert "got another or none on rank 1;" in two
    assert "got another or none on ranks 0, 2;" in one


def test_ranks_with_one_secret_have_one_key_for_each_world(processes, tmp_path, monkeypatch):
    def body(rank):
        unguarded = start_world().secret
        monkeypatch.setenv("GPIPE_HPC_SECRET", "one secret for all")
        return unguarded, start_world().secret, start_world().secret

    zero, one = processes(2, body, tmp_path)
    assert zero == one
    assert len({secret.key for secret in zero}) == 3
    assert [secret.guards for secret in zero] == [False, True, True]


class Command:
    """What a hostile sender would have the others do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_hostile_rank_makes_no_other_run_its_code_in_a_collective(
    processes, tmp_path, monkeypatch
):
    """torch's all_gather_object calls whatever the message names."""

    def body(rank):
        everybody = start_world().everybody
        value = "harmless"
        if rank == 1:
            monkeypatch.setattr(processes_module, "dumps", lambda value, what: pickle.dumps(value))
            value = Command(tmp_path / "made")
        with pytest.raises(DataError) as caught:
            everybody.all_gather_object(value)
        return str(caught.value)

    told = processes(2, body, tmp_path)[0]
    assert "a collective of ranks 0, 1, from rank 1: expected" in told
    assert "got posix.mkdir" in told
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
def test_a_hostile_rank_makes_no_other_run_its_code_at_a_boundary(
    processes, tmp_path, monkeypatch, shares_memory
):
    """The header of a message was unpickled as it came."""
    forged = pickle.dumps(Command(tmp_path / "made"))

    def body(rank):
        world = start_world(shares_memory=shares_memory)
        layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 3)]
        pipe = Pipeline(layers, F.cross_entropy, microbatches=2, world=world)
        if rank == 0:
            monkeypatch.setattr(Structure, "to_bytes", lambda self: forged)
        with pytest.raises(GpipeError) as caught:
            pipe.step(torch.ones(4, 4), torch.tensor([0, 1, 2, 0]))
        return str(caught.value)

    for told in processes(2, body, tmp_path):
        assert "rank 1" in told
        assert "got posix.mkdir" in told
    assert not (tmp_path / "made").exists()
