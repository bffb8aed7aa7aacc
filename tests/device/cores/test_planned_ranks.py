"""The share of a host that a rank of a planned run gets: threads, and ranks that compute too."""

import pytest
import torch

from gpipe_hpc.device.cores import planned_ranks
from gpipe_hpc.device.cores.machine import Core, Quota
from gpipe_hpc.device.cores.planned_ranks import (
    CpuShare,
    planned_share,
    requested_threads,
    share_of_bound,
)


@pytest.fixture
def eight(monkeypatch):
    """Make a host of eight cores with two hardware threads each, and no wish of the user."""
    cores = tuple(Core(frozenset({n, n + 8}), n // 4) for n in range(8))
    monkeypatch.setattr(planned_ranks, "inherited_cpus", lambda: frozenset(range(16)))
    monkeypatch.setattr(planned_ranks, "cores_with", lambda cpus: cores)
    monkeypatch.setattr(planned_ranks, "tightest_quota", lambda: None)
    monkeypatch.setattr(planned_ranks, "user_chose_threads", lambda: False)


@pytest.mark.parametrize(
    ("ranks", "threads", "share"),
    [
        (1, "auto", CpuShare(8, 0)),
        (2, "auto", CpuShare(4, 1)),
        (3, "auto", CpuShare(2, 2)),
        (8, "auto", CpuShare(1, 7)),
        (16, "auto", CpuShare(1, 7)),  # no more than there are cores compute at once
        (4, 1, CpuShare(1, 3)),
        (4, 4, CpuShare(4, 1)),  # more threads than cores: two of them at a time
    ],
)
def test_ranks_share_a_host_as_they_will_be_bound(eight, ranks, threads, share):
    assert planned_share(ranks, threads) == share


@pytest.mark.usefixtures("eight")
def test_a_quota_bounds_threads_and_others(monkeypatch):
    monkeypatch.setattr(planned_ranks, "tightest_quota", lambda: Quota(2.5, "group"))
    assert planned_share(4, "auto") == CpuShare(1, 1)


@pytest.mark.usefixtures("eight")
def test_what_the_user_set_stays(monkeypatch):
    monkeypatch.setattr(planned_ranks, "user_chose_threads", lambda: True)
    assert requested_threads("auto") == torch.get_num_threads()
    assert planned_share(2, "auto").num_threads == torch.get_num_threads()


@pytest.mark.usefixtures("eight")
def test_another_system_tells_nothing_of_cores(monkeypatch):
    monkeypatch.setattr(planned_ranks, "inherited_cpus", lambda: None)
    monkeypatch.setattr(planned_ranks.os, "cpu_count", lambda: 4)
    assert planned_share(3, 1) == CpuShare(1, 2)
    assert planned_share(3, None).num_threads == torch.get_num_threads()


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("own", "ranks", "share"),
    [
        (frozenset({0, 8}), 8, CpuShare(1, 7)),
        (frozenset({0, 8}), 3, CpuShare(1, 2)),
        (frozenset(range(16)), 8, CpuShare(1, 0)),  # a launcher has bound it, or nobody has
    ],
)
def test_a_rank_that_has_bound_itself_has_others_on_the_cores_it_left(
    monkeypatch, own, ranks, share
):
    monkeypatch.setattr(planned_ranks, "allowed_cpus", lambda: own)
    monkeypatch.setattr(planned_ranks.torch, "get_num_threads", lambda: 1)
    assert share_of_bound(ranks) == share


@pytest.mark.usefixtures("eight")
def test_ranks_that_are_not_to_be_bound_share_all_cores(monkeypatch):
    cores = tuple(Core(frozenset({n}), n // 6) for n in range(12))
    monkeypatch.setattr(planned_ranks, "inherited_cpus", lambda: frozenset(range(12)))
    monkeypatch.setattr(planned_ranks, "cores_with", lambda cpus: cores)
    assert planned_share(3, "auto").num_threads == 3
    assert planned_share(3, "auto", binds=False).num_threads == 4


def test_a_share_says_how_layers_are_run():
    assert str(CpuShare(1, 0)) == "on 1 thread"
    assert str(CpuShare(2, 1)) == "on 2 threads while another process computes"
    assert str(CpuShare(1, 7)) == "on 1 thread while 7 others compute"
