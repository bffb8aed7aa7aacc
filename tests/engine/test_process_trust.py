"""Ranks as processes know each other by the job's secret, and take nothing else from sockets."""

import pytest

from gpipe_hpc.comm.start import start_world
from gpipe_hpc.errors import LaunchError


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
