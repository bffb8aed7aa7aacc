"""What ranks put up for one another, and what whoever asks in vain is told."""

import threading
import time

import pytest
from torch._C._distributed_c10d import HashStore

from gpipe_hpc.comm.watchdog.store_exchange import StoreExchange
from tests.support import patience


def boards(num_ranks: int, timeout_s: float = 5.0) -> list[StoreExchange]:
    store = HashStore()
    return [StoreExchange(store, rank, timeout_s) for rank in range(num_ranks)]


def later(call, delay_s: float = 0.1) -> threading.Timer:
    timer = threading.Timer(delay_s, call)
    timer.start()
    return timer


def test_a_rank_hears_what_its_peers_tell_also_later():
    zero, one, two = boards(3)
    one.publish("where", "host one")
    timer = later(lambda: two.publish("where", "host two"))
    assert zero.collect("where", {1, 2}) == {1: "host one", 2: "host two"}
    assert zero.collect("where", []) == {}
    timer.join()


def test_whoever_has_not_told_is_named():
    zero, one, _ = boards(3, timeout_s=0.1)
    one.publish("where")
    with pytest.raises(TimeoutError, match=r"where: timed out waiting for rank 2$"):
        zero.collect("where", [1, 2])


def test_the_failure_of_a_rank_ends_the_wait_for_another():
    """Forming a group waited in torch's store, which nothing ends before the time-out."""
    (zero, _) = boards(2, timeout_s=60.0)
    timer, began_s = later(zero.close), time.monotonic()
    with pytest.raises(ConnectionError, match="group 0 1: another rank has failed"):
        zero.collect("group 0 1", [1])
    assert time.monotonic() - began_s < 10.0 * patience()
    timer.join()


def test_it_is_known_for_whom_a_rank_waits():
    """Else its watcher would say that it makes no progress, and show the wrong stack."""
    noted = []
    store = HashStore()
    zero, one = (StoreExchange(store, rank, 5.0, noted.append) for rank in range(2))
    one.publish("start")
    zero.collect("start", [1])
    assert noted == [[1], None]
