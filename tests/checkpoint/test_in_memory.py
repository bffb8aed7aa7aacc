"""Copies of ranks' states in the memory of other hosts: here folders, and threads for ranks."""

import itertools
import json
import os
import shutil
import stat
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.checkpoint.in_memory import files, open_copies
from gpipe_hpc.checkpoint.in_memory.files import CopyFolder
from gpipe_hpc.checkpoint.in_memory.placement import choose_holders, find_place
from gpipe_hpc.comm.transport import byte_moves
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.trainer.run.lock import myself


class Counting(nn.Linear):
    """A layer whose output depends on a state that is no parameter and no buffer."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.num_calls = torch.zeros(())

    def forward(self, inputs):
        return super().forward(inputs) * (1 + self.num_calls)

    def get_extra_state(self):
        return {"calls": self.num_calls, "named": ("a", 1.5)}

    def set_extra_state(self, state):
        assert state["named"] == ("a", 1.5)
        self.num_calls = state["calls"]


ABOUT = {"lineage": "a", "layout": "2 stages"}
SIZE = 4


def trained(world, num_steps, seed=0, layout=(2, 2), **settings):
    """Return a pipeline of (stages, replicas) after some steps, and its optimizer.

    The batch is cut into four micro-batches, whatever the layout.
    """
    layers = [
        LayerSpec(nn.Linear, 6, 6, dtype=torch.float64),
        nn.BatchNorm1d(6, dtype=torch.float64),
        LayerSpec(Counting, 6, 6, dtype=torch.float64),
    ]
    stages, replicas = layout
    settings = {"stages": stages, "replicas": replicas, "microbatches": 4 // replicas, **settings}
    pipe = Pipeline(layers, nn.MSELoss(), seed=seed, world=world, **settings)
    optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    steps(pipe, optimizer, range(num_steps))
    return pipe, optimizer


def steps(pipe, optimizer, numbers):
    losses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        part = pipe.share(16)
        losses.append(pipe.step(inputs[part], inputs[part].roll(1, 1)).loss)
        optimizer.step()
        for stage in pipe.stages.values():
            for layer in stage.extra_states().values():
                layer.num_calls += 0.125
    return losses


def opened(world, root, hosts=("one", "one", "two", "two"), about=ABOUT):
    host = hosts[world.rank]
    return open_copies(world, root / host, "the_run", about)


@pytest.fixture
def hosts(tmp_path):
    for host in ("one", "two", "three", "four"):
        (tmp_path / host).mkdir()
    return tmp_path


def names(root, host):
    folder = CopyFolder(root / host, "the_run").path
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("rank"))


def save_at(root, *at, seed=0, **keywords):
    """Train, and copy after these steps; return the losses of two steps more, by rank."""

    def body(world):
        copies = opened(world, root, **keywords)
        pipe, optimizer = trained(world, 0, seed)
        done = 0
        for step in at:
            steps(pipe, optimizer, range(done, step))
            copies.save(pipe, optimizer, {"position": step})
            done = step
        return steps(pipe, optimizer, (done, done + 1))

    return run_on_threads(SIZE, body)


def go_on(root, **keywords):
    """Restore on all ranks; return (step, extra, losses of two steps more) by rank, or None."""

    def body(world):
        copies = opened(world, root, **keywords)
        found = copies.find()
        if found is None:
            return None
        pipe, optimizer = trained(world, 1, seed=7)
        extra = copies.restore(found, pipe, optimizer)
        copies.forget_others()
        done = pipe.steps_done
        return done, extra, steps(pipe, optimizer, (done, done + 1))

    return run_on_threads(SIZE, body)


def test_a_restart_goes_on_to_the_bit(hosts):
    whole = save_at(hosts, 2, 5)
    assert go_on(hosts) == [(5, {"position": 5}, losses) for losses in whole]


def test_copies_are_on_both_hosts_and_nobody_elses(hosts):
    save_at(hosts, 1)
    for host in ("one", "two"):
        assert names(hosts, host) == [f"rank{rank:05d}_step00000001" for rank in range(SIZE)]
    for path in hosts.glob("*/gpipe_hpc_*/the_run/rank*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_two_generations_are_kept(hosts):
    save_at(hosts, 1, 2, 3, 4)
    assert {name[-1] for name in names(hosts, "one")} == {"3", "4"}
    assert len(names(hosts, "one")) == 2 * SIZE


DAMAGES = ["cut", "flipped", "missing", "header", "open to others"]


def harm(path, damage):
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 100)
    elif damage == "missing":
        path.unlink()
    elif damage == "open to others":
        path.chmod(0o604)
    else:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2 if damage == "flipped" else 9] ^= 4
        path.write_bytes(raw)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_has_another_in_its_place(hosts, damage):
    """A generation was lost with one copy of it."""
    whole = save_at(hosts, 3, 4)
    harm(CopyFolder(hosts / "two", "the_run").path / "rank00003_step00000004", damage)
    harm(CopyFolder(hosts / "one", "the_run").path / "rank00001_step00000004", damage)
    assert go_on(hosts) == [(4, {"position": 4}, losses) for losses in whole]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_generation_is_passed_over_for_the_one_before(hosts, caplog, damage):
    whole = save_at(hosts, 3)
    save_at(hosts, 3, 4)
    for host in ("one", "two"):
        for rank in (1, 3):  # all that hold stage 1
            harm(CopyFolder(hosts / host, "the_run").path / f"rank{rank:05d}_step00000004", damage)
    assert go_on(hosts) == [(3, {"position": 3}, losses) for losses in whole]
    assert (
        "the in-memory checkpoint of step 4 cannot be used: the copies of ranks 1, 3 are missing"
        in caplog.text
    )
    assert {name[-1] for name in names(hosts, "two")} <= {"3"}


def test_a_kill_while_copies_are_written_leaves_the_generation_before(hosts, monkeypatch):
    whole = save_at(hosts, 3)
    save_at(hosts, 1, 3)

    class Killed(BaseException):
        pass

    write = files.CopyWriter.close

    def die(self):
        if "rank00001" in self._path.name or "rank00003" in self._path.name:
            raise Killed
        write(self)

    def body(world):
        copies = opened(world, hosts)
        pipe, optimizer = trained(world, 0)
        assert copies.restore(copies.find(), pipe, optimizer) is not None
        steps(pipe, optimizer, range(3, 6))
        copies.save(pipe, optimizer, {"position": 6})

    with monkeypatch.context() as patch:
        patch.setattr(files.CopyWriter, "close", die)
        with pytest.raises(Killed):
            run_on_threads(SIZE, body)
    assert any("_step00000006" in name for name in names(hosts, "two"))
    assert go_on(hosts) == [(3, {"position": 3}, losses) for losses in whole]


def test_a_host_that_is_lost_loses_nothing(hosts):
    """Another one comes in its place, with nothing in its memory: the one that is left has all."""
    whole = save_at(hosts, 2)
    shutil.rmtree(hosts / "one")
    (hosts / "one").mkdir()
    assert go_on(hosts) == [(2, {"position": 2}, losses) for losses in whole]


def test_ranks_that_changed_hosts_get_their_states_sent(hosts, monkeypatch):
    monkeypatch.setattr(byte_moves, "PIECE_BYTES", 100)
    whole = save_at(hosts, 2)
    other = ("two", "one", "two", "one")
    assert go_on(hosts, hosts=other) == [(2, {"position": 2}, losses) for losses in whole]


def test_copies_of_another_history_are_not_taken(hosts):
    save_at(hosts, 2)
    assert go_on(hosts, about=ABOUT | {"lineage": "b"}) == [None] * SIZE


def test_copies_of_another_layout_lead_to_the_checkpoint_and_that_is_said_once(hosts, caplog):
    save_at(hosts, 2, 3)
    assert go_on(hosts, about=ABOUT | {"layout": "4 stages"}) == [None] * SIZE
    told = "the in-memory checkpoint of step 3 has another layout"
    assert len([each for each in caplog.messages if told in each]) == 1
    assert names(hosts, "one"), "nothing is removed before the run goes on from another state"


def test_copies_of_two_starts_are_not_mixed(hosts):
    """A host that came back with older ones of the same step gave half of another state."""
    for start, seed, host in (("first", 3, "one"), ("second", 0, "two")):
        whole = save_at(hosts / start, 3, seed=seed)
        shutil.copytree(hosts / start / host, hosts / host, dirs_exist_ok=True)
    for name in names(hosts, "one"):
        if name.startswith(("rank00001", "rank00003")):
            (CopyFolder(hosts / "one", "the_run").path / name).unlink()
    assert go_on(hosts) == [(3, {"position": 3}, losses) for losses in whole]


class HostDied(BaseException):
    """Stands for a host that is gone."""


@pytest.mark.parametrize(
    ("moment", "may_be"), [("write", {3}), ("close", {3, 6})], ids=["before it has sent", "after"]
)
def test_a_host_that_is_lost_while_copies_are_made(hosts, monkeypatch, moment, may_be):
    """What has left it counts if all of it has come; else the copies before are whole still."""
    where = ("one", "one", "two", "two")
    done = getattr(files.CopyWriter, moment)

    def die(self, *piece):
        if self._path.is_relative_to(hosts / "two") and "_step00000006" in self._path.name:
            raise HostDied
        done(self, *piece)

    def body(world):
        copies = opened(world, hosts)
        pipe, optimizer = trained(world, 0)
        for at in (3, 6):
            steps(pipe, optimizer, range(at - 3, at))
            copies.save(pipe, optimizer, {"position": at})

    with monkeypatch.context() as patch:
        patch.setattr(files.CopyWriter, moment, die)
        with pytest.raises(HostDied):
            run_on_threads(len(where), body)
    shutil.rmtree(hosts / "two")
    expected = run_on_threads(SIZE, lambda world: steps(*trained(world, 0), range(8)))
    for (step, extra, losses), whole in zip(
        go_on(hosts, hosts=("one",) * SIZE), expected, strict=True
    ):
        assert extra == {"position": step} and step in may_be
        assert losses == whole[step : step + 2]


def test_a_state_of_another_cut_changes_nothing_on_any_rank(hosts):
    save_at(hosts, 2)

    def body(world):
        copies = opened(world, hosts)
        found = copies.find()
        layers = [LayerSpec(nn.Linear, 6, 6), LayerSpec(nn.Linear, 6, 6)]
        pipe = Pipeline(layers, nn.MSELoss(), stages=2, replicas=2, microbatches=2, world=world)
        optimizer = torch.optim.AdamW(pipe.parameters())
        before = {name: each.detach().clone() for name, each in pipe.named_parameters()}
        assert copies.restore(found, pipe, optimizer) is None
        assert all(torch.equal(before[name], each) for name, each in pipe.named_parameters())
        assert pipe.steps_done == 0 and not optimizer.state

    run_on_threads(SIZE, body)


def test_without_room_it_is_refused_by_all_at_the_first_copy(hosts, monkeypatch):
    usage = namedtuple("usage", ["total", "used", "free"])(10**9, 10**9, 3000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"MB in .*, but only 0.0 MB are free"):
        save_at(hosts, 1)
    assert names(hosts, "one") == []


def test_memory_that_fills_up_later_costs_only_that_copy(hosts, monkeypatch, caplog):
    def fail(self, piece):
        if self._path.name in ("rank00001_step00000002", "rank00003_step00000002"):
            self.failure = OSError("no space left")

    whole = save_at(hosts, 1, 2)
    monkeypatch.setattr(files.CopyWriter, "write", with_check(files.CopyWriter.write, fail))
    assert save_at(hosts, 1, 2) == whole
    assert (
        "copies in memory of step 2 are incomplete, for example on rank 1: no space left"
        in caplog.text
    )
    assert go_on(hosts)[0][0] == 1


def with_check(write, check):
    def both(self, piece):
        check(self, piece)
        write(self, piece)

    return both


def test_what_is_over_is_removed(hosts):
    save_at(hosts, 1)
    run_on_threads(SIZE, lambda world: opened(world, hosts).remove())
    assert list((hosts / "one").iterdir()) == [] and list((hosts / "two").iterdir()) == []


def test_a_folder_that_another_run_removes_meanwhile_is_made_again(tmp_path, monkeypatch):
    """The last run of a user that ends removes the folder of all of them."""
    ending, folder = CopyFolder(tmp_path, "ending"), CopyFolder(tmp_path, "the_run")
    ending.open()
    own, removals = Path.lstat, {folder.path.parent: ending.remove, folder.path: folder.remove}

    def lstat(path):
        found = own(path)
        removals.pop(path, lambda: None)()
        return found

    monkeypatch.setattr(Path, "lstat", lstat)
    folder.open()
    assert not removals and any(folder.path.iterdir())


def test_a_start_that_is_still_ending_leaves_the_folder_to_the_next(tmp_path):
    """Only rank 0 holds the run's lock: another rank of an earlier start may end after it."""
    folder = CopyFolder(tmp_path, "the_run")
    folder.open("first", 1)
    folder.open("next", 0)
    folder.remove("first")
    assert folder.entered("next") == (0,)
    folder.remove("next")
    assert not list(tmp_path.iterdir())


def test_a_start_that_opens_the_folder_as_the_one_before_removes_it_keeps_it(tmp_path, monkeypatch):
    """The ending start had looked whether others were there, and took the folder from the next."""
    ending, following = CopyFolder(tmp_path, "the_run"), CopyFolder(tmp_path, "the_run")
    ending.open("first", 0)
    own = Path.iterdir

    def iterdir(folder):
        found = list(own(folder))
        monkeypatch.undo()
        following.open("next", 0)
        return found

    monkeypatch.setattr(Path, "iterdir", iterdir)
    ending.remove("first")
    assert following.entered("next") == (0,)
    following.remove("next")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("hosts", ["aa", "aab", "abab"])
def test_a_folder_that_is_removed_as_a_start_opens_it_is_opened_again(tmp_path, monkeypatch, hosts):
    """Its ranks ended with an assert, or took themselves for hosts of their own."""
    own, lock, removals = CopyFolder.entered, threading.Lock(), [1]

    def entered(folder, start):
        with lock:
            if removals and folder.path.parts[-3] == "a":
                removals.pop()
                shutil.rmtree(folder.path)
        return own(folder, start)

    monkeypatch.setattr(CopyFolder, "entered", entered)
    found = places(hosts, tmp_path)
    assert not removals
    for rank, place in enumerate(found):
        assert place.here == tuple(r for r, host in enumerate(hosts) if host == hosts[rank])


def test_a_folder_that_something_removes_each_time_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(CopyFolder, "entered", lambda folder, start: ())
    with pytest.raises(ConfigError, match=r"was removed .* times while it was opened"):
        places("aa", tmp_path)


def test_copies_that_dead_runs_forgot_are_removed_or_named(tmp_path, caplog, monkeypatch):
    for name, pid_started in (("lives", None), ("dead", 1), ("old", 1)):
        folder = CopyFolder(tmp_path, name)
        folder.open()
        if pid_started is not None:
            owner = myself()._replace(pid_started=pid_started)
            (folder.path / f"owner_{os.getpid()}").write_text(json.dumps(owner._asdict()))
    then = time.time() - 2 * files.FORGOTTEN_S
    for path in (*folder.path.iterdir(), folder.path):
        os.utime(path, (then, then))
    (user,) = tmp_path.iterdir()
    CopyFolder(tmp_path, "new").clear_forgotten()
    assert sorted(path.name for path in user.iterdir()) == ["dead", "lives"]
    assert "dead contains copies of a run that ended" in caplog.text


def test_a_folder_of_another_users_making_is_refused(tmp_path):
    folder = CopyFolder(tmp_path, "the_run")
    folder.path.parent.mkdir()
    folder.path.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="belongs to another user"):
        folder.open()


EVERY_HOST_OF_FIVE = ["".join(each) for each in itertools.product("abc", repeat=5)]


def places(hosts, root):
    """Return each rank's place, of ranks whose folder is their host's."""

    def body(world):
        folder = CopyFolder(root / hosts[world.rank], "the_run")
        folder.open("now", world.rank)
        return find_place(world, folder, "now")

    return run_on_threads(len(hosts), body)


@pytest.mark.parametrize("hosts", ["a", "aaa", "ab", "aabb", "aaabbc", "abab", "aaab", "aabaabb"])
def test_ranks_find_their_hosts_and_holders_by_themselves(hosts, tmp_path):
    """Each rank heard of every other's host."""
    found = places(hosts, tmp_path)
    for rank, place in enumerate(found):
        assert place.here == tuple(r for r, host in enumerate(hosts) if host == hosts[rank])
        assert place.num_hosts == len(set(hosts))
        keeps = {r for r, other in enumerate(found) if other.holder == rank} - {rank}
        assert set(place.sources) == keeps and len(place.sources) == len(keeps)
    assert [place.holder for place in found] == choose_holders(hosts)


@pytest.mark.parametrize("hosts", [*EVERY_HOST_OF_FIVE, "a" * 7 + "bc", "abc" * 9, "aab" * 5])
def test_copies_go_to_other_hosts_evenly(hosts):
    """As before: a rank that keeps its own copy would lose both, one that keeps many be full."""
    holders = choose_holders(hosts)
    if len(set(hosts)) == 1:
        assert holders == list(range(len(hosts)))
        return
    assert all(hosts[holder] != hosts[rank] for rank, holder in enumerate(holders))
    largest = max(map(hosts.count, hosts))
    fewest = -(-largest // (len(hosts) - largest))  # the most that one of the others has to keep
    assert max(map(holders.count, holders)) == max(1, fewest)


def test_the_holders_of_thousands_are_found_in_their_number():
    """Each rank looked at all others to find its own: 16 million for 4,096 ranks."""
    hosts = [Seen(rank // 8) for rank in range(4096)]
    assert choose_holders(hosts)[:9] == [*range(8, 17)]
    assert sum(host.num_compared for host in hosts) < 20 * len(hosts)


class Seen:
    """A host that counts how often it is looked at."""

    def __init__(self, name):
        self.name, self.num_compared = name, 0

    def __hash__(self):
        self.num_compared += 1
        return hash(self.name)

    def __eq__(self, other):
        self.num_compared += 1
        return self.name == other.name


def test_a_folder_that_another_rank_removes_meanwhile_is_no_failure(tmp_path, monkeypatch):
    """At the good end of a run one of eight ranks of a host showed a traceback, with code 1.

    It had just found the folder there when another rank removed it.
    """
    folder = CopyFolder(tmp_path, "the_run")
    folder.open("first", 0)
    (other := CopyFolder(tmp_path, "the_run")).open("first", 1)
    assert folder.entered("first") == (0, 1)
    other.remove("first")
    assert not folder.path.exists()
    monkeypatch.setattr(Path, "is_dir", lambda path: True)  # as it was a moment ago
    folder.remove("first")
    assert folder.entered("first") == ()
