"""The soak of experiments/soak: what it draws, how it judges, and its short form."""

import math
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from experiments.soak.__main__ import Options, chosen, execute, parsed
from experiments.soak.comparing import largest_difference
from experiments.soak.execution import FORCED, Execution, FailedCheckError, Verdict
from experiments.soak.hosts import this_machine
from experiments.soak.injection import ActiveRun, InjectedFault, corrupt, inject
from experiments.soak.plan import ALL_MICROBATCHES, LAYOUTS, Kind, draw
from experiments.soak.processes import families, seen
from experiments.soak.results import Results


def test_a_seed_gives_the_same_faults_in_whatever_number():
    whole, part = draw(7, 100), draw(7, 13)
    assert [fault for run in part for fault in run.faults] == [
        fault for run in whole for fault in run.faults
    ][:13]
    assert [fault.number for run in whole for fault in run.faults] == list(range(100))
    assert draw(8, 100) != whole


def test_a_hundred_faults_have_all_kinds_and_numbers_of_ranks():
    """Each run goes on in the layout that it was told, and one that keeps its layout does."""
    runs = draw(0, 100)
    kinds = Counter(fault.kind for run in runs for fault in run.faults)
    assert kinds.keys() == set(Kind) and min(kinds.values()) >= 2
    ranks = {fault.layout.ranks for run in runs for fault in run.faults}
    assert ranks == set(range(2, 9))
    assert {run.keeps_layout for run in runs} == {run.on_hosts for run in runs} == {True, False}
    for run in runs:
        for fault, following in zip(run.faults, run.faults[1:], strict=False):
            assert fault.after == following.layout and fault.victim < fault.layout.ranks
        if run.keeps_layout:
            assert {fault.after for fault in run.faults} == {run.faults[0].layout}
        else:
            assert "model.dtype=float64" in run.words
    here = draw(0, 10, most_ranks=3, with_hosts=False)
    assert len({fault.kind for run in here for fault in run.faults}) == 10
    assert {fault.layout.ranks for run in here for fault in run.faults} == {2, 3}


def test_layouts_share_the_micro_batches():
    for layout in LAYOUTS:
        assert 2 <= layout.ranks <= 8 and ALL_MICROBATCHES % layout.replicas == 0
        assert layout.stages * layout.replicas >= layout.ranks


def test_one_fault_or_those_from_one_on_are_struck_alone():
    whole = chosen(Options(faults=20))
    (alone,) = chosen(Options(faults=20, only=7))
    assert alone.faults == (whole[1].faults[2],) and alone.words == whole[1].words
    assert chosen(Options(faults=20, first=10)) == whole[2:]
    assert parsed(["faults=3", "hosts=false", "out=x"]) == Options(faults=3, hosts=False, out="x")
    with pytest.raises(SystemExit, match="expected words like"):
        parsed(["fault=3"])


def test_states_that_differ_in_anything_are_told_apart():
    one = {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.int64)}
    assert largest_difference(one, dict(one)) == 0.0
    assert largest_difference(one, one | {"a": torch.tensor([1.0, 1.5])}) == 0.5
    for other in ({"a": one["a"]}, one | {"a": torch.ones(3)}):
        assert largest_difference(one, other) == math.inf
    assert largest_difference(one, one | {"a": torch.tensor([1.0, math.nan])}) == math.inf


@pytest.mark.parametrize(
    "way", ["a flipped byte", "a short file", "a missing file", "an empty manifest"]
)
def test_a_corrupted_checkpoint_differs_in_one_file(tmp_path, way):
    before = {"0.distcp": b"some bytes", "1.distcp": b"more bytes", "gpipe_hpc.json": b"{}"}
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    damaged = corrupt(way, tmp_path, which=3)
    assert damaged == ("gpipe_hpc.json" if way == "an empty manifest" else "1.distcp")
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.pop(damaged, None) != before.pop(damaged)
    assert after == before


def test_a_family_is_found_and_its_end_seen(until):
    child = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    root = seen(child.pid)
    assert root is not None
    until(lambda: len(families([root])) == 2, 10, "the grandchild is there")
    family = families([root])
    root.signal(signal.SIGSTOP)
    until(lambda: root.is_stopped, 10, "it is stopped")
    for each in family:
        each.signal(signal.SIGKILL)
    until(lambda: not any(each.lives for each in family), 10, "all are gone")
    assert child.wait() == -signal.SIGKILL and families([root]) == set()


@dataclass
class Ended:
    """A rank that has ended so."""

    code: int
    output: str


GOOD = "ERROR rank 1 on here: gone\ngpipe_hpc: PeerError: rank 1 on here: gone; look at its log"
KILLED = Ended(-9, "")
FRAME = 'Traceback (most recent call last):\n  File "/a/gpipe_hpc/train.py", line 1'


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ([Ended(1, GOOD), KILLED], None),
        ([Ended(-9, f"{GOOD}\nrank 0: {FORCED}"), KILLED], None),
        ([Ended(-9, GOOD), KILLED], "rank 0 ended with -9"),
        ([Ended(0, GOOD), KILLED], "rank 0 ended with 0"),
        ([Ended(1, GOOD), Ended(0, "")], "rank 1 ended with 0"),
        ([Ended(1, "lost something"), KILLED], "rank 0 did not print"),
        ([Ended(1, GOOD.partition(";")[0]), KILLED], "rank 0 did not print look at its log"),
        ([Ended(1, f"{GOOD}\n{FRAME}"), KILLED], "rank 0 shows a traceback of gpipe_hpc"),
    ],
)
def test_what_is_not_as_it_must_be_is_found(tmp_path, ranks, problem):
    (run,) = draw(0, 1)
    server = SimpleNamespace(ask=lambda **request: None)
    hosts = this_machine(server, is_private=False)
    execution = Execution(run, hosts, tmp_path / "work", tmp_path, pace_s=0.0, can_fill=False)
    execution._ranks = ranks
    verdict = Verdict(run.faults[0])
    names = {0: (r"rank 1 on here\b", "gone")}
    injected = InjectedFault(time.time(), names, {1: frozenset({-9})}, remedy="look at its log")
    execution._judge(injected, verdict)
    assert len(verdict.problems) == bool(problem), verdict.problems
    assert problem is None or verdict.problems[0].startswith(problem)


class CommandedLayer:
    """A rank that ends at the moment somebody looks at it, after it has `noted` an order or not."""

    output = ""

    def __init__(self, note=None):
        self._note = note

    @property
    def code(self):
        if self._note is not None:
            self._note.write_text("5.0")
        return 7


def test_a_rank_that_obeys_and_ends_between_two_looks_has_obeyed(tmp_path):
    """The soak took it for one that had ended without doing what was ordered."""
    faults = [fault for run in draw(0, 100) for fault in run.faults]
    fault = next(each for each in faults if each.way == "os._exit(7)" and each.victim == 0)
    hosts = SimpleNamespace(place_of=lambda rank, size: SimpleNamespace(name="here"))
    order = tmp_path / "order"
    live = ActiveRun(
        hosts, [CommandedLayer(tmp_path / "order.done")], tmp_path, order, can_fill=False
    )
    assert inject(fault, live).since_s == 5.0
    (tmp_path / "order.done").unlink()
    with pytest.raises(TimeoutError, match="rank 0 did not execute its command"):
        inject(fault, replace(live, ranks=[CommandedLayer()]))


def test_a_run_that_does_not_come_to_its_end_after_all_faults_is_told_of(capsys):
    """A rank ended with a traceback there, and the results said of that run nothing at all."""

    def fail():
        raise FailedCheckError("the run did not end well")

    (run,) = draw(0, 5)
    verdicts = [Verdict(fault) for fault in run.faults]
    execution = SimpleNamespace(verdicts=lambda: iter(verdicts), end=fail, close=lambda: None)
    results = Results([], None, None)
    execute(run, execution, results)
    assert results.exit_code == results.num_problems == 1
    assert "the run could not continue: the run did not end well" in capsys.readouterr().out
    assert "1 runs finished, 0 of them equal" in results.text()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [0, 1])
def test_a_run_that_is_struck_five_times_ends_as_one_that_never_was(
    process_server, tmp_path, number
):
    """The two have all ten kinds of fault that strike on one machine."""
    run = draw(14, 10, most_ranks=3, with_hosts=False)[number]
    assert run.keeps_layout == (number == 0)
    hosts = this_machine(process_server, is_private=False)
    execution = Execution(run, hosts, tmp_path / "work", tmp_path, pace_s=0.005, can_fill=False)
    try:
        verdicts = list(execution.verdicts())
        end = execution.end()
    finally:
        execution.close()
    assert [verdict.fault for verdict in verdicts] == list(run.faults)
    found = {verdict.fault.kind.value: verdict.problems for verdict in verdicts}
    assert not any(found.values()) and not end.problems, (found, end)
    assert end.steps > 20 and end.tensors > 100
