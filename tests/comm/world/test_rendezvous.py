"""Real small processes, forked: each runs the true code over a real socket."""

import json
import multiprocessing
import os
import queue
import re
import resource
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gpipe_hpc.comm.net.addresses import Interface
from gpipe_hpc.comm.net.sealed_store import SealedStore
from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.world import rendezvous as module
from gpipe_hpc.comm.world.launcher import Launch, detect_launch
from gpipe_hpc.comm.world.membership import Member
from gpipe_hpc.comm.world.rendezvous import (
    is_own_address,
    open_rendezvous,
    raise_file_limit,
    rendezvous,
)
from gpipe_hpc.errors import LaunchError
from tests.support import free_port, mute, patience

Work = Callable[[Launch], object]


def launches(world_size: int, **changes: object) -> list[Launch]:
    port = free_port()
    return [
        replace(
            Launch(rank, world_size, rank, world_size, "environment", "127.0.0.1", port), **changes
        )
        for rank in range(world_size)
    ]


def run(ranks: list[Launch], work: Work, limit_s: float = 30.0) -> dict[int, object]:
    """Run ``work`` in one process a rank; return what each returned, or its LaunchError's text."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def child(launch: Launch) -> None:
        torch.set_num_threads(1)
        try:
            answers.put((launch.rank, work(launch)))
        except LaunchError as error:
            answers.put((launch.rank, str(error)))
        answers.close()
        answers.join_thread()
        os._exit(0)

    processes = [context.Process(target=child, args=(launch,)) for launch in ranks]
    for process in processes:
        process.start()
    results: dict[int, object] = {}
    try:
        for _ in ranks:
            rank, result = answers.get(timeout=limit_s * patience())
            results[rank] = result
    except queue.Empty:
        pytest.fail(f"no answer in {limit_s} s from some of {len(ranks)}, got {results}")
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    return results


def sum_of_ranks(launch: Launch) -> float:
    store = rendezvous(launch, 20.0)
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.world_size)
    total = torch.tensor(float(launch.rank))
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return total.item()


def test_ranks_meet_and_start_a_group():
    assert run(launches(3), sum_of_ranks) == {0: 3.0, 1: 3.0, 2: 3.0}


def test_ranks_meet_on_all_interfaces_too():
    spread = launches(2, local_size=1, local_rank=0)
    assert run(spread, sum_of_ranks) == {0: 1.0, 1: 1.0}


def late(launch: Launch) -> float:
    time.sleep(0.4 * (launch.world_size - 1 - launch.rank))
    return sum_of_ranks(launch)


def test_rank_0_may_come_last():
    assert run(launches(3), late) == {0: 3.0, 1: 3.0, 2: 3.0}


def impatient(launch: Launch) -> str:
    rendezvous(launch, 1.5)
    return "met"


def test_every_waiting_rank_names_the_missing():
    ranks = launches(6)
    came = [ranks[0], ranks[2], ranks[5]]
    results = run(came, impatient)
    assert set(results) == {0, 2, 5}
    for rank, message in results.items():
        assert f"rank {rank}: not all ranks arrived within 1.5 s, expected 6, got 3" in message
        assert "missing ranks 1, 3-4;" in message


def staggered(launch: Launch) -> str:
    time.sleep(0.8 * launch.rank)
    return impatient(launch)


def test_ranks_that_start_apart_hear_one_verdict():
    results = run(launches(3)[:2], staggered)
    assert "missing rank 2;" in results[0]
    assert "missing rank 2;" in results[1]


def rank_0_late(launch: Launch) -> str:
    time.sleep(1.0 if launch.rank == 0 else 0.0)
    return impatient(launch)


def test_a_rank_that_gives_up_before_rank_0_decides_for_all():
    # Rank 1's time ends a second before rank 0's: rank 0 must not go on without it.
    started = time.monotonic()
    results = run(launches(3)[:2], rank_0_late)
    assert "missing rank 2;" in results[0]
    assert "missing rank 2;" in results[1]
    assert time.monotonic() - started < 20 * patience()


def test_a_missing_rank_0_is_named():
    results = run(launches(3)[1:], impatient)
    for rank in (1, 2):
        assert f"rank {rank} of 3 on {socket.gethostname()} waited 1.5 s" in results[rank]
        assert "missing rank 0" in results[rank]


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        launch = replace(launches(2)[0], master_port=server.getsockname()[1])
        with pytest.raises(LaunchError, match=rf"cannot listen on port {launch.master_port}"):
            rendezvous(launch, 2.0)


def other_torch(launch: Launch) -> str:
    if launch.rank == 1:
        with mock.patch.object(torch, "__version__", "1.0.0"):
            return impatient(launch)
    return impatient(launch)


def test_unequal_versions_stop_every_rank():
    results = run(launches(3), other_torch)
    for message in results.values():
        assert f"torch is {torch.__version__} on rank 0 and 1.0.0 on rank 1" in message


def test_unequal_world_sizes_stop_every_rank():
    zero, one = launches(2)
    results = run([zero, replace(one, world_size=3, local_size=3)], impatient)
    assert "world size is 2 on rank 0 and 3 on rank 1" in results[0]
    assert results[1] != "met"


def listening_addresses(launch: Launch) -> list[str]:
    """Return the local addresses that listen on the master port, read from the kernel."""
    store = rendezvous(launch, 10.0)
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for line in list(lines)[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == "0A" and int(local.split(":")[1], 16) == launch.master_port:
                    found.append(local.split(":")[0])
    store.set(f"read/{launch.rank}", "")
    store.wait([f"read/{rank}" for rank in range(launch.world_size)], timedelta(seconds=10))
    # The server must outlive the last answer of its clients.
    time.sleep(0.3 if launch.rank == 0 else 0.0)
    return found


LOOPBACK = ["0100007F"]


def test_one_machine_listens_on_loopback_only():
    assert run(launches(2), listening_addresses)[0] == LOOPBACK


def interface(launch: Launch) -> str | None:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    rendezvous(replace(launch, rank=0, world_size=1, local_size=1), 1.0)
    first = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "chosen"
    rendezvous(replace(launch, rank=0, world_size=1, local_size=1), 1.0)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"
    return first


def test_gloo_is_kept_on_loopback_unless_its_variable_is_set():
    assert run(launches(1), interface)[0] in ("lo", "lo0")


def test_one_process_needs_no_port():
    def alone(launch: Launch) -> float:
        with mock.patch.object(module, "TCPStore", side_effect=AssertionError("opened a store")):
            return sum_of_ranks(launch)

    assert run([Launch(0, 1, 0, 1, "none", "127.0.0.1", 0)], alone) == {0: 0.0}


def agent_store(port: int) -> dist.TCPStore:
    """Serve what torchrun's agent serves: one store for all attempts."""
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def test_an_agents_store_is_joined_and_attempts_are_kept_apart():
    port = free_port()
    server = agent_store(port)
    first = launches(2, master_port=port, agent_store=True)
    # Attempt 0: rank 1 never comes, rank 0 leaves its name and its verdict behind.
    assert "missing rank 1;" in run(first[:1], impatient)[0]
    second = [replace(launch, restart_count=1) for launch in first]
    assert run(second, sum_of_ranks) == {0: 1.0, 1: 1.0}
    del server


def die_in_the_roll_call(launch: Launch) -> None:
    """End, as by kill -9, while others are still missing."""
    threading.Timer(0.5, os._exit, (9,)).start()
    rendezvous(launch, 20.0)


def test_an_attempt_that_was_killed_while_it_met_holds_up_nobody():
    """Ranks read what the dead had left: agents that count restarts differently did not meet."""
    port = free_port()
    server = agent_store(port)
    for killed in launches(3, master_port=port, agent_store=True)[::2]:
        child = multiprocessing.get_context("fork").Process(
            target=die_in_the_roll_call, args=(killed,)
        )
        child.start()
        child.join()
    # Fewer ranks; rank 1 comes first and finds the meeting that the dead rank 0 had opened.
    ranks = launches(2, master_port=port, agent_store=True)
    assert run_all(ranks, delayed({0: 1.0, 1: 0.0})) == ["met", "met"]
    more = launches(4, master_port=port, agent_store=True)
    assert run(more, sum_of_ranks) == dict.fromkeys(range(4), 6.0)
    del server


def test_under_an_agent_a_missing_rank_0_is_named_by_the_others():
    port = free_port()
    server = agent_store(port)
    ranks = launches(3, master_port=port, agent_store=True)
    results = run(ranks[1:], impatient)
    assert all("missing rank 0;" in message for message in results.values())
    del server


def twice(launch: Launch) -> list[float]:
    return [sum_of_ranks(launch), sum_of_ranks(launch)]


def test_a_process_may_meet_again_under_an_agent():
    port = free_port()
    server = agent_store(port)
    results = run(launches(2, master_port=port, agent_store=True), twice)
    assert results == {0: [1.0, 1.0], 1: [1.0, 1.0]}
    del server


def delayed(delays: dict[int, float]) -> Work:
    """Let each of several processes, told by LOCAL_RANK, start after a while."""

    def work(launch: Launch) -> str:
        time.sleep(delays[launch.local_rank])
        return impatient_for(8.0)(launch)

    return work


def impatient_for(limit_s: float, secret: Secret | None = None) -> Work:
    def work(launch: Launch) -> str:
        try:
            store = rendezvous(launch, limit_s, secret=secret)
        except LaunchError as error:
            return f"{error}"
        # The server stays until the others have heard.
        store.set(f"met/{launch.local_rank}", "")
        time.sleep(2.0 if launch.rank == 0 else 0.0)
        return "met"

    return work


def run_all(ranks: list[Launch], work: Work) -> list[object]:
    """As `run`, for processes with one rank: told apart by LOCAL_RANK."""

    def told(launch: Launch) -> object:
        return launch.local_rank, work(launch)

    answers = multiprocessing.get_context("fork").Queue()
    context = multiprocessing.get_context("fork")

    def child(launch: Launch) -> None:
        answers.put(told(launch))
        answers.close()
        answers.join_thread()
        os._exit(0)

    processes = [context.Process(target=child, args=(launch,)) for launch in ranks]
    for process in processes:
        process.start()
    try:
        return [text for _, text in sorted(answers.get(timeout=40 * patience()) for _ in ranks)]
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def doubled(*ranks: int, world_size: int = 2, **changes: object) -> list[Launch]:
    first = launches(world_size, **changes)[0]
    return [
        replace(first, rank=rank, local_rank=index, local_size=world_size)
        for index, rank in enumerate(ranks)
    ]


def test_two_processes_of_one_rank_are_named_on_all_ranks():
    """Two went on, with whichever of the two was first."""
    started = time.monotonic()
    texts = run_all(doubled(0, 1, 1, world_size=3), delayed({0: 0, 1: 0.3, 2: 0.6}))
    pattern = r"two processes are rank 1: process \d+ on .+ and process \d+ on .+;"
    assert all(re.search(pattern, text) for text in texts), texts
    assert time.monotonic() - started < 20 * patience()


def test_two_processes_of_rank_0_are_named_on_all_ranks():
    texts = run_all(doubled(0, 0, 1, world_size=3), delayed({0: 0, 1: 0.5, 2: 0.2}))
    assert all("two processes are rank 0: process" in t for t in texts), texts


def test_a_second_process_of_a_rank_that_comes_late_is_turned_away():
    texts = run_all(doubled(0, 1, 1), delayed({0: 0, 1: 0.1, 2: 1.2}))
    assert texts[:2] == ["met", "met"]
    assert "two processes are rank 1: process" in texts[2]
    assert "the first one continues" in texts[2]


def test_under_an_agent_too_two_processes_of_one_rank_are_named():
    port = free_port()
    server = agent_store(port)
    ranks = doubled(0, 1, 1, world_size=3, agent_store=True)
    ranks = [replace(launch, master_port=port) for launch in ranks]
    texts = run_all(ranks, delayed({0: 0, 1: 0.2, 2: 0.8}))
    assert all("two processes are rank 1: process" in t for t in texts), texts
    del server


def test_under_an_agent_one_process_may_follow_another():
    """A script that torchrun starts may run two commands, one after the other."""
    port = free_port()
    server = agent_store(port)
    ranks = launches(2, master_port=port, agent_store=True)
    for _ in range(2):
        assert run(ranks, sum_of_ranks) == {0: 1.0, 1: 1.0}
    del server


@pytest.mark.parametrize("addr", ["192.0.2.7", "no.such.host.invalid"])
def test_a_wrong_address_is_not_hidden_by_all_ranks_being_here(addr: str):
    """With LOCAL_WORLD_SIZE = WORLD_SIZE, loopback was used whatever MASTER_ADDR said."""
    for launch in launches(2, master_addr=addr):
        with pytest.raises(LaunchError, match=rf"wrong MASTER_ADDR.*got {addr}.*LOCAL_WORLD_SIZE"):
            rendezvous(launch, 5.0)


def test_the_names_of_this_machine_are_its_own():
    assert is_own_address("127.0.0.1") and is_own_address("localhost")
    assert not is_own_address("192.0.2.7")


def gloo_interface(launch: Launch) -> tuple[str | None, int]:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.pop(variable, None)
    found = listening_addresses(launch)
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    assert os.environ.get("NCCL_SOCKET_IFNAME") == (chosen and f"={chosen}")
    return chosen, len(found)


def test_ranks_that_know_of_no_others_here_agree_on_loopback_once_they_have_met():
    """One rank alone kept Gloo on loopback, and the other listened on all interfaces."""
    unequal = [
        replace(launch, local_size=launch.rank + 1, local_known=launch.rank == 1)
        for launch in launches(2)
    ]
    results = run(unequal, gloo_interface)
    assert {name for name, _ in results.values()} in ({"lo"}, {"lo0"})


def with_secret(secrets: dict[int, Secret | None]) -> Work:
    return lambda launch: impatient_for(8.0, secrets[launch.rank])(launch)


OURS, THEIRS = Secret(b"ours", "our file"), Secret(b"theirs", "their file")


@pytest.mark.parametrize("other", [THEIRS, None], ids=["another", "none"])
def test_ranks_without_the_secret_are_named_on_all_ranks(other: Secret | None):
    results = run(launches(3), with_secret({0: OURS, 1: OURS, 2: other}))
    source = "their file" if other else "nowhere"
    for text in results.values():
        assert "the ranks do not share a secret" in text
        assert "rank 0 has one from our file" in text
        assert "1 of 3 ranks have a different one or none: rank 2 (process " in text
        assert f"secret from {source})" in text


def test_ranks_with_one_secret_meet():
    assert set(run(launches(2), with_secret({0: OURS, 1: OURS})).values()) == {"met"}


def test_a_strangers_store_in_rank_0s_place_is_not_believed():
    """Somebody else took the port first and lets everybody in."""
    (_, one) = launches(2)
    server = dist.TCPStore("127.0.0.1", one.master_port, is_master=True, wait_for_workers=False)
    keys = dist.PrefixStore("gen0", server)
    keys.set("verdict", json.dumps({"refusal": "", "local": True}))
    keys.set("answer/1", "0" * 32)
    keys.set("rank/0", "anything")
    text = run([one], with_secret({1: OURS}))[1]
    assert "rank 0 did not prove the job's secret (from our file)" in text
    assert "set MASTER_PORT to another" in text


def test_something_that_is_no_store_is_named_in_time():
    """torch's client waits for its answer without end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = replace(launches(2)[1], master_port=server.getsockname()[1])
        with pytest.raises(LaunchError, match=r"rank 1 on .* cannot use the store.*no answer of a"):
            rendezvous(one, 1.0)


def forging(launch: Launch) -> str:
    """Rank 1 is a stranger who reaches the store and writes an address in rank 0's place."""
    server = launch.rank == 0
    port = launch.master_port
    plain = dist.TCPStore("127.0.0.1", port, 2, server, wait_for_workers=False)
    if not server:
        plain.wait(["0/ready"])
        plain.set("0/address", Secret(b"guessed", "a guess").seal("the store's address", b"here"))
        plain.set("0/forged", "")
        plain.wait(["0/done"])
        return "forged"
    sealed = SealedStore(dist.PrefixStore("0", plain), OURS)
    copy = sealed.clone()
    sealed.set("address", b"\x00\xff here")
    sealed.set("other", "there")
    assert (sealed.get("address"), copy.get("other")) == (b"\x00\xff here", b"there")
    assert (
        sealed.compare_set("first", "", "one") == sealed.compare_set("first", "", "two") == b"one"
    )
    assert sealed.add("count", 2) + sealed.add("count", 3) == 7
    sealed.set("moved", "x")
    plain.set("0/moved", plain.get("0/other"))
    with pytest.raises(ConnectionError, match=r"the store's moved: the value is not authenticated"):
        sealed.get("moved")
    plain.set("0/ready", "")
    plain.wait(["0/forged"])
    try:
        sealed.get("address")
    except ConnectionError as error:
        return str(error)
    finally:
        plain.set("0/done", "")
        time.sleep(0.3)
    return "believed"


def test_what_a_stranger_writes_into_the_store_is_not_believed():
    results = run(launches(2), forging)
    assert results[1] == "forged"
    assert "the store's address: the value is not authenticated by the job's secret" in results[0]


def test_ranks_set_by_hand_listen_on_loopback_alone():
    """LOCAL_RANK without LOCAL_WORLD_SIZE: rank 0's store listened on all interfaces."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [detect_launch({**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]

    def look(launch: Launch) -> tuple[list[str], str | None]:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        return listening_addresses(launch), os.environ.get("GLOO_SOCKET_IFNAME")

    found = run(ranks, look)
    assert found[0] == found[1]
    assert found[0][0] == LOOPBACK and found[0][1] in ("lo", "lo0")


@pytest.mark.parametrize(("most", "allowed"), [(4096, 3000), (2000, 2000), (-1, 3000)])
def test_rank_0_may_open_a_file_for_each_rank_or_says_that_it_may_not(
    monkeypatch, caplog, most, allowed
):
    """The usual limit, 1,024, is reached at 500 ranks, and then nobody can join any more."""
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, most))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.append(both))
    raise_file_limit(1000)
    assert limits == []
    raise_file_limit(3000)
    assert limits == [(allowed, most)]
    assert ("needs 3000 open files, but the limit is 2000" in caplog.text) is (most == 2000)


def limited(limit_s: float, reach_s: float, secret: Secret | None = None) -> Work:
    return lambda launch: str(
        open_rendezvous(launch, limit_s, secret=secret, reach_s=reach_s).store
    )


def test_a_host_that_does_not_answer_is_named_long_before_the_time_is_over():
    """A wrong MASTER_ADDR, or a firewall: every rank waited for ten minutes."""
    with mute() as (addr, port):
        one = replace(launches(2)[1], master_addr=addr, master_port=port)
        began_s = time.monotonic()
        text = run([one], limited(60.0, 2.0))[1]
    assert time.monotonic() - began_s < 20.0 * patience()
    assert f"rank 1 of 2 on {socket.gethostname()} tried for 2 s to reach rank 0" in text
    assert f"at {addr}:{port}: the host does not answer" in text and "firewall" in text


def test_a_name_that_means_nothing_is_named_as_soon():
    spread = replace(launches(2)[1], master_addr="no.such.host.invalid", local_size=1, local_rank=0)
    text = run([spread], limited(60.0, 1.5))[1]
    assert "MASTER_ADDR is not the name or address of a host" in text
    assert "no.such.host.invalid" in text and "/etc/hosts" in text


def test_a_host_that_is_there_is_waited_for_longer():
    """Rank 0 may start later: then its host refuses."""

    def work(launch: Launch) -> str:
        time.sleep(2.5 if launch.rank == 0 else 0.0)
        store = open_rendezvous(launch, 30.0, reach_s=1.0).store
        store.set(f"met/{launch.rank}", "")
        store.wait(["met/0", "met/1"], timedelta(seconds=10))
        time.sleep(1.0 if launch.rank == 0 else 0.0)  # the server outlives the last answer
        return "met"

    assert run(launches(2), work) == {0: "met", 1: "met"}


def test_rank_0_is_not_waited_for_at_an_address_that_is_another_host_s():
    zero = replace(launches(2)[0], master_addr="203.0.113.7", local_size=1)
    text = run([zero], limited(60.0, 1.0))[0]
    assert "no other rank connected to MASTER_ADDR=203.0.113.7" in text
    assert "is not an address of this host" in text


def test_who_listens_and_is_no_store_is_named_as_soon():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = replace(launches(2)[1], master_port=server.getsockname()[1])
        text = run([one], limited(60.0, 1.0))[1]
    assert "cannot use the store" in text and "another program listens there" in text


def test_in_the_store_of_another_job_ranks_hear_that_rank_0_could_not_serve():
    """Rank 0 ended at once, and the others waited for it in somebody else's store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [replace(launch, master_port=server.port) for launch in launches(3)]
    began_s = time.monotonic()
    results = run(ranks, limited(60.0, 20.0, OURS))
    assert time.monotonic() - began_s < 30.0 * patience()
    for rank, text in results.items():
        assert f"rank 0 on {socket.gethostname()} cannot listen" in text, rank
        assert f"cannot listen on port {server.port}" in text
    del server


class Towards:
    """A rank's meeting, by what of the network it sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **addresses: str) -> None:
        held = {"10.0.0.1": "eth0", "10.0.0.2": "eth0", "127.0.0.1": "lo"}
        monkeypatch.setattr(module, "address_towards", lambda host: addresses.get(host, ""))
        monkeypatch.setattr(module, "address_outside", lambda: "10.0.0.2")
        monkeypatch.setattr(
            module, "holder_of", lambda each: Interface(held[each], each) if each in held else None
        )

    @staticmethod
    def meeting(rank: int, own: str = "", far: str = "") -> "module._Meeting":
        launch = replace(launches(2)[rank], master_addr="host1", local_size=1, local_rank=0)
        me = Member.of(launch, "")
        meeting = module._StoreConnection(launch, OURS, me, 60.0, time.monotonic() + 60.0, 1.0)
        meeting._own, meeting._far = own, far
        return meeting


def test_a_host_whose_name_is_loopback_hears_from_others_how_they_see_it(monkeypatch):
    """Debian gives a host's own name 127.0.1.1: other hosts were told to call that."""
    sees = Towards(monkeypatch, host1="127.0.0.1")
    store = dist.HashStore()
    other = sees.meeting(1, own="10.0.0.2", far="10.0.0.1")
    other.publish_seen_address(store)
    assert other.interface_towards_others(store) == Interface("eth0", "10.0.0.2")
    for own in ("", "127.0.0.1"):  # rank 0, which serves, and another one of its host
        found = sees.meeting(0, own=own).interface_towards_others(store)
        assert found == Interface("eth0", "10.0.0.1")


def test_without_a_word_from_others_the_default_route_is_taken(monkeypatch):
    found = Towards(monkeypatch).meeting(0).interface_towards_others(dist.HashStore())
    assert found == Interface("eth0", "10.0.0.2")
