"""Threads that may have drawn while a backward ran."""

import os
import threading
import time

import torch

from gpipe_hpc.engine.backward_draws import _others, _running


def test_a_thread_that_draws_without_a_pause_is_seen():
    """Linux adds its time at the next tick only, so training was refused for its draws."""
    stops, draws = threading.Event(), [0]

    def draw():
        while not stops.is_set():
            torch.rand(64)
            draws[0] += 1

    thread = threading.Thread(target=draw)
    thread.start()
    drew = []
    try:
        until = time.monotonic() + 30
        while len(drew) < 20 and time.monotonic() < until:
            others, before = _others(), draws[0]
            torch.ones(100_000).sum()
            if draws[0] > before:
                drew.append(thread.name in _running(others))
    finally:
        stops.set()
        thread.join()
    assert drew and all(drew)


def test_a_waiting_main_thread_of_a_forked_process_is_not_taken_for_one_that_draws():
    """Python 3.11 kept the number of the parent's thread: draws in backwards were only logged."""

    def look():
        time.sleep(0.2)  # until the main thread waits
        others = _others()
        codes.append(bool(_running(others)))

    pid = os.fork()
    if pid == 0:
        codes = []
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        os._exit(codes != [False])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
