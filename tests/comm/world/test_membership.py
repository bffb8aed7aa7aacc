"""The roll call of ranks that are threads: what each asks the store for, and who is named."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch._C._distributed_c10d import HashStore, Store

from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.world.launcher import Launch
from gpipe_hpc.comm.world.membership import Member, MembershipCheck
from gpipe_hpc.errors import LaunchError
from tests.support import patience

OURS, THEIRS = Secret(b"ours", "our file"), Secret(b"theirs", "their file")


class Asked:
    """One rank's way to the store: which keys it has asked for, and how many bytes it has read."""

    def __init__(self, store: Store):
        self._store, self.keys, self.num_bytes = store, set(), 0

    def check(self, keys: list[str]) -> bool:
        self.keys.update(keys)
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        self.keys.add(key)
        value = self._store.get(key)
        self.num_bytes += len(value)
        return value

    def set(self, key: str, value: str | bytes) -> None:
        self.keys.add(key)
        self.num_bytes += len(value)
        self._store.set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.keys.add(key)
        return self._store.compare_set(key, expected, desired)


def hold(
    world_size: int,
    ranks: list[int] | None = None,
    *,
    limit_s: float = 30.0,
    secret: Callable[[int], Secret] = lambda rank: OURS,
    member: Callable[[Member], Member] = lambda member: member,
) -> tuple[dict[int, object], dict[int, Asked]]:
    """Hold a roll call; return what each rank was told, and what it has asked for."""
    store = HashStore()
    present = list(range(world_size)) if ranks is None else ranks
    asked = {rank: Asked(store) for rank in present}

    def body(rank: int) -> object:
        launch = Launch(rank, world_size, rank, world_size, "environment", "127.0.0.1", 1)
        launch = replace(launch, agent_store=True)
        me = member(Member.of(launch, secret(rank).source))
        deadline = time.monotonic() + limit_s
        call = MembershipCheck(launch, asked[rank], secret(rank), me, limit_s, deadline)
        try:
            return call.wait_for_all()
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(len(present)) as pool:
        return dict(zip(present, pool.map(body, present), strict=True)), asked


def test_no_rank_asks_for_more_in_a_larger_world():
    """Every rank asked for all, and so the store was asked W squared times."""
    most = {}
    for world_size in (4, 64, 200):
        told, asked = hold(world_size)
        assert set(told.values()) == {True}
        most[world_size] = max(len(each.keys) for each in asked.values())
        assert max(each.num_bytes for each in asked.values()) < 10_000
    # Itself, the verdict, an answer; of each of eight below it a name, a line and an answer.
    assert most[4] < most[64] == most[200] <= 4 + 3 * 8


@pytest.mark.parametrize("stranger", [0, 3, 60])
def test_a_stranger_anywhere_in_the_tree_is_named_on_all_ranks(stranger: int):
    told, _ = hold(70, secret=lambda rank: THEIRS if rank == stranger else OURS)
    for text in told.values():
        assert "do not share a secret" in text
        assert f"rank {stranger} (process" in text or stranger == 0


@pytest.mark.parametrize("other", [1, 40, 69])
def test_a_rank_with_another_version_anywhere_is_named_on_all_ranks(other: int):
    def member(me: Member) -> Member:
        return replace(me, versions=me.versions | {"torch": "1.0"}) if me.rank == other else me

    told, _ = hold(70, member=member)
    for text in told.values():
        assert f"and 1.0 on rank {other};" in text


def test_ranks_of_two_machines_are_not_taken_for_one():
    told, _ = hold(20, member=lambda me: replace(me, machine=f"machine {me.rank // 10}"))
    assert set(told.values()) == {False}


@pytest.mark.parametrize("missing", [[1], [5, 6, 7, 69], [*range(40, 60)]])
def test_the_missing_are_named_by_rank_0_wherever_they_stand(missing: list[int]):
    present = [rank for rank in range(70) if rank not in missing]
    began_s = time.monotonic()
    told, asked = hold(70, present, limit_s=1.0)
    spans = {1: "rank 1;", 5: "ranks 5-7, 69;", 40: "ranks 40-59;"}[missing[0]]
    for text in told.values():
        assert f"expected 70, got {70 - len(missing)}: missing {spans}" in text
    assert time.monotonic() - began_s < 5.0 * patience()
    others = [len(each.keys) for rank, each in asked.items() if rank]
    assert max(others) <= 5 + 3 * 8, "rank 0 alone looks for all"


def test_without_rank_0_those_next_to_it_name_the_missing():
    told, asked = hold(30, [*range(1, 30)], limit_s=0.5)
    assert all("missing rank 0;" in text for text in told.values())
    assert all(len(asked[rank].keys) < 30 for rank in range(9, 30))
