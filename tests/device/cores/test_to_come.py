"""What a rank of a run to come has on a host: threads, and others that compute beside it."""

import pytest
import torch

from gpipe_hpc.device.cores import to_come
from gpipe_hpc.device.cores.machine import Core, Quota
from gpipe_hpc.device.cores.to_come import Share, share_of_bound, share_to_come, wished_threads


@pytest.fixture
def eight(monkeypatch):
    """Make a host of eight cores with two hardware threads each, and no wish of the user."""
    cores = tuple(Core(frozenset({n, n + 8}), n // 4) for n in range(8))
    monkeypatch.setattr(to_come, "given_cpus", lambda: frozenset(range(16)))
    monkeypatch.setattr(to_come, "cores_with", lambda cpus: cores)
    monkeypatch.setattr(to_come, "tightest_quota", lambda: None)
    monkeypatch.setattr(to_come, "user_chose_threads", lambda: False)


@pytest.mark.parametrize(
    ("ranks", "threads", "share"),
    [
        (1, "auto", Share(8, 0)),
        (2, "auto", Share(4, 1)),
        (3, "auto", Share(2, 2)),
        (8, "auto", Share(1, 7)),
        (16, "auto", Share(1, 7)),  # no more than there are cores compute at once
        (4, 1, Share(1, 3)),
        (4, 4, Share(4, 1)),  # more threads than cores: two of them at a time
    ],
)
def test_ranks_share_a_host_as_they_will_be_bound(eight, ranks, threads, share):
    assert share_to_come(ranks, threads) == share


@pytest.mark.usefixtures("eight")
def test_a_quota_bounds_threads_and_others(monkeypatch):
    monkeypatch.setattr(to_come, "tightest_quota", lambda: Quota(2.5, "group"))
    assert share_to_come(4, "auto") == Share(1, 1)


@pytest.mark.usefixtures("eight")
def test_what_the_user_set_stays(monkeypatch):
    monkeypatch.setattr(to_come, "user_chose_threads", lambda: True)
    assert wished_threads("auto") == torch.get_num_threads()
    assert share_to_come(2, "auto").num_threads == torch.get_num_threads()


@pytest.mark.usefixtures("eight")
def test_another_system_tells_nothing_of_cores(monkeypatch):
    monkeypatch.setattr(to_come, "given_cpus", lambda: None)
    monkeypatch.setattr(to_come.os, "cpu_count", lambda: 4)
    assert share_to_come(3, 1) == Share(1, 2)
    assert share_to_come(3, None).num_threads == torch.get_num_threads()


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("own", "ranks", "share"),
    [
        (frozenset({0, 8}), 8, Share(1, 7)),
        (frozenset({0, 8}), 3, Share(1, 2)),
        (frozenset(range(16)), 8, Share(1, 0)),  # a launcher has bound it, or nobody has
    ],
)
def test_a_rank_that_has_bound_itself_has_others_on_the_cores_it_left(
    monkeypatch, own, ranks, share
):
    monkeypatch.setattr(to_come, "allowed_cpus", lambda: own)
    monkeypatch.setattr(to_come.torch, "get_num_threads", lambda: 1)
    assert share_of_bound(ranks) == share


@pytest.mark.usefixtures("eight")
def test_ranks_that_are_not_to_be_bound_share_all_cores(monkeypatch):
    cores = tuple(Core(frozenset({n}), n // 6) for n in range(12))
    monkeypatch.setattr(to_come, "given_cpus", lambda: frozenset(range(12)))
    monkeypatch.setattr(to_come, "cores_with", lambda cpus: cores)
    assert share_to_come(3, "auto").num_threads == 3
    assert share_to_come(3, "auto", binds=False).num_threads == 4


def test_a_share_says_how_layers_are_run():
    assert str(Share(1, 0)) == "on 1 thread"
    assert str(Share(2, 1)) == "on 2 threads while another process computes"
    assert str(Share(1, 7)) == "on 1 thread while 7 others compute"
