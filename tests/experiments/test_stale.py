"""The parameter server of experiments/outer/stale: what its bound promises."""

import random
import threading
import time
from multiprocessing.connection import Listener

import pytest
import torch

from experiments.outer.stale.remote import ADDRESS, RemoteShard, serve
from experiments.outer.stale.shard import Shard, divided, sum_in_order
from experiments.outer.stale.text_model import initial_values, read_text, update_of
from experiments.outer.stale.without_bound import AsynchronousShard, GossipShard
from experiments.outer.stale.working import work

WORKERS = 3
RATE = 0.1


@pytest.fixture(scope="module")
def text():
    return read_text(200_000)


def on_threads(bodies):
    """Run all at once; raise what the first that failed raised."""
    failures = []

    def guarded(body):
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def train(shards, parts, num_iterations, compute, pause_s=0.003):
    """Make iterations as all workers, each held up at random."""
    names = [list(part) for part in parts]

    def body(worker):
        chance = random.Random(worker)

        def held_up(values, clock):
            time.sleep(chance.random() * pause_s)
            return compute(values, worker, clock)

        return lambda: work(shards, names, worker, range(num_iterations), held_up)

    on_threads([body(worker) for worker in range(WORKERS)])


def synchronous(text, num_iterations):
    """Return the parameters after plain synchronous steps: a sum in the order of workers."""
    values = initial_values()
    for clock in range(num_iterations):
        copies = [{n: v.clone() for n, v in values.items()} for _ in range(WORKERS)]
        updates = [update_of(copies[w], text, w, clock, RATE) for w in range(WORKERS)]
        values = {n: v + sum_in_order([u[n] for u in updates]) for n, v in values.items()}
    return values


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_bound_0_is_the_synchronous_step_bit_for_bit(text, num_shards):
    parts = list(divided(initial_values(), num_shards))
    shards = [Shard(part, WORKERS, bound=0) for part in parts]
    train(shards, parts, 12, lambda values, w, clock: update_of(values, text, w, clock, RATE))
    expected = synchronous(text, 12)
    for shard in shards:
        number, values = shard.settled()
        assert number == 12 and shard.most_ahead == 0
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_worker_sees_what_the_bound_promises(bound):
    """Each worker adds 1 to its own counter, so what it reads tells whose updates it sees."""
    initial = {"counts": torch.zeros(WORKERS), "more": torch.zeros(WORKERS)}
    parts = list(divided(initial, 2))
    shards = [Shard(part, WORKERS, bound) for part in parts]

    def count(values, worker, clock):
        for seen in values.values():
            assert seen[worker] == clock  # its own, all of them
            assert seen.min() >= clock - bound
            assert seen.max() <= clock + bound
        own = torch.zeros(WORKERS)
        own[worker] = 1
        return {"counts": own, "more": own.clone()}

    train(shards, parts, 60, count)
    for shard in shards:
        assert shard.most_ahead <= bound
        assert all((value == 60).all() for value in shard.settled()[1].values())


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_the_fastest_waits_when_it_is_the_bound_ahead(bound):
    """One worker does nothing: the other makes `bound` + 1 iterations and is told whom it lacks."""
    shard = Shard({"x": torch.zeros(1)}, 2, bound, limit_s=0.05)
    with pytest.raises(TimeoutError, match=rf"iteration {bound + 1} .* workers \[1\]"):
        work([shard], [["x"]], 0, range(100), lambda values, clock: {"x": torch.ones(1)})
    assert shard.most_ahead == bound
    assert shard.settled()[0] == 0  # nothing that not all have finished
    work([shard], [["x"]], 1, range(1), lambda values, clock: {"x": torch.ones(1)})
    assert shard.settled()[0] == 1 and shard.settled()[1]["x"] == 2
    assert shard.read(0, bound + 1)["x"] == 2 + bound  # and the rest of its own


def test_a_worker_that_does_not_keep_to_the_rules_is_refused():
    shard = Shard({"x": torch.zeros(1)}, 2, bound=1)
    with pytest.raises(AssertionError, match="adds to iteration 0"):
        shard.add(0, 0, {"x": torch.ones(1)})  # without having read
    with pytest.raises(AssertionError, match="reads for iteration 1"):
        shard.read(0, 1)  # ahead of its own clock
    shard.read(0, 0)
    shard.add(0, 0, {"x": torch.ones(1)})
    with pytest.raises(AssertionError, match="adds to iteration 0"):
        shard.add(0, 0, {"x": torch.ones(1)})  # twice


def test_the_server_notices_a_worker_that_is_too_far_ahead(monkeypatch):
    """With the wait taken out, the server's own check finds what the bound forbids."""
    shard = Shard({"x": torch.zeros(1)}, 2, bound=2)
    monkeypatch.setattr(Shard, "_may_begin", lambda self, clock: True)
    with pytest.raises(AssertionError, match="3 iterations ahead, expected at most 2"):
        work([shard], [["x"]], 0, range(9), lambda values, clock: {"x": torch.ones(1)})


def test_shards_divide_the_parameters():
    values = initial_values()
    parts = list(divided(values, 2))
    assert sorted(name for part in parts for name in part) == sorted(values)
    sizes = [sum(value.numel() for value in part.values()) for part in parts]
    assert max(sizes) - min(sizes) <= max(value.numel() for value in values.values())
    assert [list(part) for part in parts] == [list(part) for part in divided(values, 2)]


def test_shards_behind_a_connection_give_the_same_bits(text):
    """Over sockets of loopback, each shard served by threads as its own process would."""
    parts = list(divided(initial_values(), 2))
    shards = [Shard(part, WORKERS, bound=0) for part in parts]
    listeners = [Listener((ADDRESS, 0), authkey=b"key") for _ in shards]
    servers = [
        threading.Thread(target=serve, args=(shard, listener, WORKERS))
        for shard, listener in zip(shards, listeners, strict=True)
    ]
    for server in servers:
        server.start()
    names = [list(part) for part in parts]

    def body(worker):
        def run():
            remote = [
                RemoteShard(listener.address[1], b"key", part)
                for listener, part in zip(listeners, parts, strict=True)
            ]
            try:
                work(
                    remote,
                    names,
                    worker,
                    range(6),
                    lambda values, clock: update_of(values, text, worker, clock, RATE),
                )
            finally:
                for each in remote:
                    each.close()

        return run

    on_threads([body(worker) for worker in range(WORKERS)])
    for server in servers:
        server.join()
    for listener in listeners:
        listener.close()
    expected = synchronous(text, 6)
    for shard in shards:
        for name, value in shard.settled()[1].items():
            assert torch.equal(value, expected[name]), name


def count_up(values, clock):
    """Add 1 to every number."""
    return {name: torch.ones_like(value) for name, value in values.items()}


@pytest.mark.parametrize("kind", [AsynchronousShard, GossipShard])
def test_without_a_bound_nobody_waits(kind):
    """One worker makes 50 iterations while the others make none; each update counts once."""
    shard = kind({"x": torch.zeros(2, dtype=torch.float64)}, WORKERS)
    work([shard], [["x"]], 0, range(50), count_up)
    assert shard.most_ahead == 49
    number, values = shard.settled()
    assert number == 50 // WORKERS
    assert values["x"].tolist() == pytest.approx([50, 50], abs=1e-9)


@pytest.mark.parametrize("kind", [AsynchronousShard, GossipShard])
def test_without_a_bound_no_update_is_lost(kind):
    """Whoever comes when, and through however many shards."""
    parts = [{"a": torch.zeros(2, dtype=torch.float64)}, {"b": torch.ones(1, dtype=torch.float64)}]
    shards = [kind(part, WORKERS) for part in parts]
    train(shards, parts, 40, lambda values, worker, clock: count_up(values, clock))
    (first, a), (second, b) = (shard.settled() for shard in shards)
    assert first == second == 40
    assert torch.allclose(a["a"], torch.full((2,), 40.0 * WORKERS, dtype=torch.float64))
    assert b["b"].item() == pytest.approx(1 + 40 * WORKERS)


def test_gossip_brings_workers_together():
    """Without updates all become the mean; pairs are drawn among others only."""
    shard = GossipShard({"x": torch.zeros(1, dtype=torch.float64)}, WORKERS)
    shard.read(0, 0)
    shard.add(0, 0, {"x": torch.ones(1, dtype=torch.float64)})
    for clock in range(1, 40):
        for worker in range(WORKERS):
            assert shard.peer(worker, clock) != worker
            seen = shard.read(worker, clock)["x"].item()
    assert seen == pytest.approx(1)
    assert shard.settled()[1]["x"].item() == pytest.approx(1)


def test_gossip_alone_is_plain_descent(text):
    shard = GossipShard(initial_values(), 1)
    names = [list(initial_values())]
    work([shard], names, 0, range(5), lambda values, clock: update_of(values, text, 0, clock, RATE))
    values = initial_values()
    for clock in range(5):
        copies = {name: value.clone() for name, value in values.items()}
        update = update_of(copies, text, 0, clock, RATE)
        values = {name: value + update[name] for name, value in values.items()}
    for name, value in shard.settled()[1].items():
        assert torch.allclose(value, values[name], atol=1e-6), name
