"""Real small processes, forked: each runs the true code over a real socket."""

import multiprocessing
import os
import queue
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gpipe_hpc.comm import rendezvous as module
from gpipe_hpc.comm.launcher import Launch
from gpipe_hpc.comm.rendezvous import rendezvous
from gpipe_hpc.errors import LaunchError

Work = Callable[[Launch], object]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


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
            rank, result = answers.get(timeout=limit_s)
            results[rank] = result
    except queue.Empty:
        pytest.fail(f"no answer in {limit_s} s from some of {len(ranks)}, got {results}")
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    return results


def sum_of_ranks(launch: Launch, loopback: bool | None = None) -> float:
    store = rendezvous(launch, 20.0, loopback)
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
        assert f"rank {rank}: not all ranks came within 1.5 s, expected 6, got 3" in message
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
    assert time.monotonic() - started < 20


def test_a_missing_rank_0_is_named():
    results = run(launches(3)[1:], impatient)
    for rank in (1, 2):
        assert f"rank {rank} of 3 waited 1.5 s" in results[rank]
        assert "missing rank 0" in results[rank]


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        launch = replace(launches(2)[0], master_port=server.getsockname()[1])
        with pytest.raises(LaunchError, match=rf"expected port {launch.master_port} to be free"):
            rendezvous(launch, 2.0)


def other_torch(launch: Launch) -> str:
    if launch.rank == 1:
        with mock.patch.object(torch, "__version__", "1.0.0"):
            return impatient(launch)
    return impatient(launch)


def test_unequal_versions_stop_every_rank():
    results = run(launches(3), other_torch)
    for message in results.values():
        assert f"expected torch {torch.__version__} as on rank 0, got 1.0.0 on rank 1" in message


def test_unequal_world_sizes_stop_every_rank():
    zero, one = launches(2)
    results = run([zero, replace(one, world_size=3, local_size=3)], impatient)
    assert "expected world size 2 as on rank 0, got 3 on rank 1" in results[0]
    assert results[1] != "met"


def listening_addresses(launch: Launch, loopback: bool | None = None) -> list[str]:
    """Return the local addresses that listen on the master port, read from the kernel."""
    store = rendezvous(launch, 10.0, loopback)
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


def test_all_interfaces_on_request():
    results = run(launches(2), lambda launch: listening_addresses(launch, loopback=False))
    assert results[0] != LOOPBACK
    assert len(results[0]) == 1


def test_loopback_over_machines_is_refused():
    spread = launches(2, local_size=1)[0]
    with pytest.raises(LaunchError, match=r"loopback does not reach.*all 2 ranks.*got 1"):
        rendezvous(spread, 1.0, loopback=True)


def interface(launch: Launch) -> tuple[str | None, str | None]:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    rendezvous(replace(launch, rank=0, world_size=1, local_size=1), 1.0, loopback=False)
    untouched = os.environ.get("GLOO_SOCKET_IFNAME")
    rendezvous(replace(launch, rank=0, world_size=1, local_size=1), 1.0)
    first = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "chosen"
    rendezvous(replace(launch, rank=0, world_size=1, local_size=1), 1.0)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"
    return untouched, first


def test_gloo_is_kept_on_loopback_unless_told_otherwise():
    untouched, first = run(launches(1), interface)[0]
    assert untouched is None
    assert first in ("lo", "lo0")


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
