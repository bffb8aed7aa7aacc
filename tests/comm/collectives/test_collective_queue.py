"""Plans that take turns: they go on though nobody waits, in order, and end with their owner."""

import gc
import threading

import pytest
import torch

from gpipe_hpc.comm.collectives.collective_queue import CollectiveQueue
from gpipe_hpc.comm.collectives.planned import start_ring_all_reduce
from gpipe_hpc.comm.world.threads import run_on_threads


def test_a_plan_ends_though_nobody_waits_for_it(until):
    """Else nothing but its first step would be hidden behind computing."""

    def body(world):
        own = torch.full((100,), float(world.rank))
        start_ring_all_reduce(world.world_group, own)  # four steps
        until(lambda: bool((own == 3.0).all()), 20, "the sum is there")
        return True

    assert run_on_threads(3, body) == [True] * 3


def test_jobs_keep_their_order_whoever_does_them():
    turns, done, gate = CollectiveQueue("a test"), [], threading.Event()

    def job(number):
        def do(note):
            assert gate.wait(20)
            done.append(number)

        return do

    started = [turns.start(job(number)) for number in range(8)]
    gate.set()
    for turn in reversed(started):
        turn.wait(lambda ranks: None)
    assert done == list(range(8))


def test_a_failed_job_fails_those_behind_it_and_those_that_come_later():
    turns, done = CollectiveQueue("a test"), []

    def fail(note):
        raise ConnectionError("the cause")

    started = [turns.start(done.append), turns.start(fail), turns.start(done.append)]
    started[0].wait(lambda ranks: None)
    for turn in (*started[1:], turns.start(done.append)):
        with pytest.raises(ConnectionError, match="the cause"):
            turn.wait(lambda ranks: None)
    assert len(done) == 1


def test_who_waits_hears_for_whom_until_it_has_ended():
    turns, heard, gate = CollectiveQueue("a test"), [], threading.Event()

    def job(note):
        note([1, 2])
        assert gate.wait(20)
        note(None)

    turn = turns.start(job)
    threading.Timer(0.2, gate.set).start()
    turn.wait(heard.append)
    assert [1, 2] in heard and heard[-1] is None


def test_the_thread_ends_with_its_owner(until):
    turns = CollectiveQueue("a test that ends")
    turns.start(lambda note: None).wait(lambda ranks: None)
    names = {thread.name for thread in threading.enumerate()}
    assert "a test that ends" in names
    del turns
    gc.collect()
    until(
        lambda: "a test that ends" not in {thread.name for thread in threading.enumerate()},
        20,
        "the thread is gone",
    )
