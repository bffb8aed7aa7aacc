"""Processes of a job authenticate each other by its secret and refuse unexpected data."""

import os
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.collectives import torch_group as torch_group_module
from gpipe_hpc.comm.transport.routed import RoutedTransport
from gpipe_hpc.comm.transport.wire import NestStructure
from gpipe_hpc.comm.world import processes as processes_module
from gpipe_hpc.comm.world.source import own_source
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.errors import DataError, GpipeError, LaunchError, ModelError


@pytest.mark.parametrize("lacks", [False, True], ids=["another", "none"])
def test_ranks_with_different_secrets_all_refuse_to_start(processes, tmp_path, monkeypatch, lacks):
    """In a process group that the user created, one rank has another secret or none."""

    def body(rank):
        monkeypatch.setenv("GPIPE_HPC_SECRET", f"the secret of rank {rank != 1:d} and more")
        if rank == 1 and lacks:
            monkeypatch.delenv("GPIPE_HPC_SECRET")
        with pytest.raises(LaunchError) as caught:
            start_world()
        return str(caught.value)

    zero, one, two = processes(3, body, tmp_path)
    assert "from GPIPE_HPC_SECRET, rank 1 a different one or none;" in zero
    assert ", rank 1 a different one or none;" in two
    assert ", ranks 0, 2 a different one or none;" in one


def test_ranks_with_same_secret_derive_same_key_for_each_world(processes, tmp_path, monkeypatch):
    def body(rank):
        unguarded = start_world().secret
        monkeypatch.setenv("GPIPE_HPC_SECRET", "one secret for all")
        return unguarded, start_world().secret, start_world().secret

    zero, one = processes(2, body, tmp_path)
    assert zero == one
    assert len({secret.key for secret in zero}) == 3
    assert [secret.guards for secret in zero] == [False, True, True]


class UnpickledCommand:
    """Object that creates a directory when it is unpickled, in place of a malicious command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_malicious_pickle_in_a_collective_is_refused(processes, tmp_path, monkeypatch):
    """torch's all_gather_object would call any function that the pickle names."""

    def body(rank):
        world_group = start_world().world_group
        value = "harmless"
        if rank == 1:
            monkeypatch.setattr(
                torch_group_module, "dumps", lambda value, what: pickle.dumps(value)
            )
            value = UnpickledCommand(tmp_path / "made")
        with pytest.raises(DataError) as caught:
            world_group.all_gather_object(value)
        return str(caught.value)

    message = processes(2, body, tmp_path)[0]
    assert "a collective of ranks 0, 1, from rank 1: received" in message
    assert "received posix.mkdir" in message
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
def test_malicious_pickle_between_stages_is_refused(
    processes, tmp_path, monkeypatch, shares_memory
):
    """Regression: the header of a message was unpickled without checks."""
    forged = pickle.dumps(UnpickledCommand(tmp_path / "made"))

    def body(rank):
        world = start_world(shares_memory=shares_memory)
        layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 3)]
        pipe = Pipeline(layers, F.cross_entropy, microbatches=2, world=world)
        if rank == 0:
            monkeypatch.setattr(NestStructure, "to_bytes", lambda self: forged)
        with pytest.raises(GpipeError) as caught:
            pipe.step(torch.ones(4, 4), torch.tensor([0, 1, 2, 0]))
        return str(caught.value)

    for message in processes(2, body, tmp_path):
        assert "rank 1" in message
        assert "received posix.mkdir" in message
    assert not (tmp_path / "made").exists()


def test_different_source_code_on_one_rank_stops_all_ranks(processes, tmp_path, monkeypatch):
    """Regression: ranks with the same version but one edited file trained together."""

    def body(rank):
        if rank == 1:
            edited = own_source()._replace(digest="0" * 64, folder="/other/gpipe_hpc")
            monkeypatch.setattr(processes_module, "own_source", lambda: edited)
        with pytest.raises(LaunchError) as caught:
            start_world()
        return str(caught.value)

    for message in processes(3, body, tmp_path):
        assert "different source code of gpipe_hpc: rank 0 " in message
        assert "rank 1 /other/gpipe_hpc (000000000000);" in message


def losses(monkeypatch):
    """Train two steps; return the types of transports of the channels, and the losses."""
    kinds = []

    def routed(routes, *others):
        kinds.extend(type(transport).__name__ for transport in routes.values())
        return RoutedTransport(routes, *others)

    monkeypatch.setattr(processes_module, "RoutedTransport", routed)
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 3)]
    pipe = Pipeline(layers, F.cross_entropy, microbatches=2, world=start_world())
    batch = torch.arange(16.0).reshape(4, 4), torch.tensor([0, 1, 2, 0])
    return set(kinds), [pipe.step(*batch).loss for _ in range(2)]


def test_channels_fall_back_to_gloo_if_one_rank_cannot_share_memory(
    processes, tmp_path, monkeypatch, caplog
):
    """Regression: a container whose seccomp profile refuses memfd_create ended the run.

    Here rank 1 of three refuses; all channels have an end on it.
    """

    def body(rank):
        plain = losses(monkeypatch)
        if rank == 1:
            monkeypatch.setattr(os, "memfd_create", refuse)
        fallen_back = losses(monkeypatch)
        return plain, fallen_back, caplog.text

    answers = processes(3, body, tmp_path)
    assert [plain for (_, plain), _, _ in answers] == [fallen for _, (_, fallen), _ in answers]
    assert {kind for (kinds, _), _, _ in answers for kind in kinds} == {"SharedTransport"}
    assert {kind for _, (kinds, _), _ in answers for kind in kinds} == {"ProcessTransport"}
    assert "cannot share memory with other processes (PermissionError: [Errno 1]" in answers[1][2]
    assert "cannot share memory" not in answers[0][2]


def refuse(*args):
    raise PermissionError(1, "Operation not permitted")


def test_user_error_on_a_single_rank_is_reported(processes, tmp_path):
    """Regression: it became "generator raised StopIteration" without another rank to notify."""

    def body(rank):
        with pytest.raises(ModelError, match=r'layers\.0.*KeyError: "the user\'s own mistake"'):
            Pipeline([LayerSpec(FailingLayer)], F.cross_entropy, world=start_world())
        return "raised"

    assert processes(1, body, tmp_path) == ["raised"]


class FailingLayer(nn.Module):
    def __init__(self):
        super().__init__()
        raise KeyError("the user's own mistake")


def test_error_is_raised_unchanged_if_it_cannot_be_reported():
    def body(world):
        def broken(report):
            raise RuntimeError("the store is gone")

        world.fail = broken
        with (
            pytest.raises(KeyError, match="the user's own mistake"),
            collective_errors(world, "here"),
        ):
            raise KeyError("the user's own mistake")

    run_on_threads(1, body)
