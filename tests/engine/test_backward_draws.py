"""Threads that may have drawn while a backward ran."""

import threading

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
        for _ in range(300):
            others, before = _others(), draws[0]
            torch.ones(100_000).sum()
            if draws[0] > before:
                drew.append(thread.name in _running(others))
    finally:
        stops.set()
        thread.join()
    assert drew and all(drew)
