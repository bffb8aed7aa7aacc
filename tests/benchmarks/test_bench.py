"""The benchmark's own arithmetic and protocol; nothing here measures time."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import rounds
from benchmarks.__main__ import KEPT, parsed
from benchmarks.blocks import cost_s, run_blocks
from benchmarks.cells import (
    CONTESTANTS,
    Block,
    Cell,
    Contestant,
    floor_cell,
    named_schedules,
    our_cells,
    short_blocks,
    torch_cells,
)
from benchmarks.comparison import moves, report
from benchmarks.figures import Figures, Row, load_figures, quartiles, rows_of
from benchmarks.limits import LayerTimes, limit_of
from benchmarks.probes import forget_peak, is_disturbed, machine_busy_s, memory
from benchmarks.rounds import Conductor, Measured, Sample, check_gradients
from benchmarks.table import block_lines
from benchmarks.worker import Worker
from benchmarks.worker_pool import WorkerError, WorkerPool
from benchmarks.workloads import make_workload, plain_gradients
from gpipe_hpc.errors import DataError
from gpipe_hpc.schedule import build, schedule_names, to_text
from tests.support import patience

ROOT = Path(__file__).resolve().parents[2]


def row(contestant, variant, median_s, *, spread=0.0, recompute="never"):
    near = (median_s * (1 - spread / 2), median_s * (1 + spread / 2))
    return Row(contestant, variant, recompute, 10, 10, median_s, near, 1.0, (5_000_000,))


def figures(floor_s, ours_s, *, spread=0.0):
    rows = [row("floor", "local", floor_s), row("ours", "gpipe", ours_s, spread=spread)]
    return Figures("2 cores", "2026-01-01", {"ours": "2.13"}, {"A M=4 core": rows})


def sample(step_s, *, is_disturbed=False):
    return Sample((step_s, 0.9 * step_s), 2 * step_s, 0.0, 0, is_disturbed)


def test_every_schedule_is_a_cell_somewhere():
    cells = our_cells("A", 8, named_schedules(), again=2)
    assert {cell.variant for cell in cells} == set(schedule_names()) - {"file"}
    assert {cell.recompute for cell in cells} == {"never", "except_last"}


def test_torch_is_not_asked_what_it_refuses():
    assert [cell.variant for cell in torch_cells("A", 1, again=False)] == ["GPipe"]


def test_keys_of_cells_differ():
    cells = [cell for block in short_blocks() for cell in block.cells]
    assert len({cell.key for cell in cells}) == len(cells)


def test_a_block_keeps_the_contestants_it_is_told():
    block = short_blocks()[0].of(["ours"])
    assert {cell.contestant for cell in block.cells} == {"ours"}


@pytest.mark.parametrize("name", ["A", "A16", "B", "C", "T"])
def test_cuts_hold_all_layers_once(name):
    workload = make_workload(name, "tiny")
    for num_stages in (1, 2, 4, 8):
        spans = workload.spans(num_stages)
        assert [index for span in spans for index in span] == list(range(len(workload.layers)))
    inputs, targets = workload.batch()
    assert len(inputs) == len(targets) == workload.batch_size
    assert torch.equal(inputs, workload.batch()[0])


def test_limit_is_the_floor_and_the_fill_and_drain():
    times = LayerTimes((1.0,) * 4, (2.0,) * 4, (1.0,) * 4)
    limit = limit_of(build("gpipe", ranks=2, microbatches=4), [2, 2], times, [1.2, 1.2], [2, 2])
    # Four micro-batches of 6 on a rank, one more of each stage's to fill and drain.
    assert limit.step_s == pytest.approx(1.2 * 30 / 24)
    assert limit.bubble == pytest.approx(0.2)


def test_limit_is_no_less_than_the_busiest_rank():
    times = LayerTimes((1.0, 1.0), (2.0, 2.0), (1.0, 1.0))
    one = limit_of(build("gpipe", ranks=2, microbatches=64), [1, 1], times, [1.0, 3.0], [1, 1])
    assert one.step_s == pytest.approx(3.0, rel=0.01)


def test_limit_does_not_take_one_ranks_noise_for_imbalance():
    """Layers of one rank were timed while others worked; whole steps say that both are equal."""
    times = LayerTimes((1.0, 1.0, 3.0, 3.0), (2.0, 2.0, 6.0, 6.0), (1.0, 1.0, 3.0, 3.0))
    table = build("interleaved", ranks=2, microbatches=32)
    limit = limit_of(table, [1, 1, 1, 1], times, [1.0, 1.0], [2, 2])
    assert 1.0 < limit.step_s < 1.05


def test_layer_times_of_ranks_are_put_together():
    times = LayerTimes.of([{"1": [2, 3, 4]}, {"0": [1, 2, 1]}])
    assert times.forward == (1, 2) and times.backward == (2, 3)
    # An input's half that came out above the whole is the whole.
    assert times.input_half == (1, 3)


def test_no_limit_lies_below_the_floor():
    """In turn one rank is late: each alone takes 1 s in the median, a step of both takes 2 s."""
    ranks = [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (1.0, 2.0), (2.0, 1.0)]
    samples = [Sample(each, sum(each), 0.0, 0, False) for each in ranks]
    layers = {str(index): [1.0, 2.0, 1.0] for index in range(4)}
    halves = [dict(list(layers.items())[:2]), dict(list(layers.items())[2:])]
    floor = Measured(floor_cell("A", 4), samples)
    floor.notes = [{"counts": [2, 2], "layers": half} for half in halves]
    ours = Measured(Cell("ours", "A", "gpipe", 4), samples)
    table = build("gpipe", ranks=2, microbatches=4)
    ours.notes = [{"counts": [2, 2], "table": to_text(table)}] * 2
    block = Block("A", 4, "core", (floor.cell, ours.cell))
    below, found = rows_of(block, [floor, ours])
    assert below.median_s == 2.0
    assert found.limit_s == pytest.approx(2.0 * 5 / 4)
    assert found.bubble == pytest.approx(1 - 4 / 5)


def test_disturbed_visits_do_not_count():
    cell = Cell("ours", "A", "gpipe", 2)
    each = Measured(cell, [sample(1.0), sample(3.0), sample(0.5, is_disturbed=True)])
    each.peaks = [[6, 8], [8, 8]]
    each.notes = [{"counts": [4, 4]}]
    (found,) = rows_of(Block("A", 2, "core", (cell,)), [each])
    assert (found.median_s, found.num_clean, found.num_visits) == (2.0, 2, 3)
    assert found.peak_bytes == (7, 8)


def test_without_an_undisturbed_visit_the_least_is_marked():
    cell = Cell("plain", "A", "whole batch", 2)
    each = Measured(cell, [sample(1.0, is_disturbed=True), sample(3.0, is_disturbed=True)])
    (_, _, line) = block_lines(rows_of(Block("A", 2, "core", (cell,)), [each]))
    assert "| ~1000 |" in line


def test_visits_are_due_in_proportion():
    each = Measured(Cell("ours", "A", "gpipe", 2, wanted=2))
    due = []
    for number in range(10):
        if each.is_due(number, 10):
            due.append(number)
            each.samples.append(sample(1.0))
    assert due == [0, 5]
    assert not each.is_due(10, 10)


def test_foreign_time_disturbs():
    assert is_disturbed(1.0, 0.2)
    assert not is_disturbed(1.0, 0.05)
    assert not is_disturbed(0.1, 0.02)  # the clock's two ticks


def test_quartiles_of_few_values_are_their_range():
    assert quartiles([1.0, 2.0, 9.0]) == (1.0, 9.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


def test_figures_survive_their_file(tmp_path):
    kept = figures(1.0, 1.5)
    kept.save(tmp_path / "figures.json")
    assert load_figures(tmp_path / "figures.json") == kept
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("text", ["", "[]", '{"blocks": {"A": [{"nonsense": 1}]}}'])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "figures.json"
    path.write_text(text)
    with pytest.raises(DataError, match="no figures of a benchmark"):
        load_figures(path)


def test_a_failed_cell_is_shown_as_such():
    failed = Row("deepspeed", "1F1B", "never", failed="it | broke; its logs are in x")
    assert "(it / broke)" in list(block_lines([failed]))[-1]


def test_only_what_moved_beyond_the_spread_is_told():
    kept = figures(1.0, 1.5)
    assert "none moved" in report(figures(2.0, 3.01), kept)  # the whole machine is slower
    assert "ours gpipe: 1.800" in report(figures(1.0, 1.8), kept)
    assert "none moved" in report(figures(1.0, 1.8, spread=0.3), kept)
    (move,) = moves(figures(1.0, 1.2), kept)
    assert move.now / move.kept == pytest.approx(0.8) and move.is_beyond


def test_only_equal_blocks_are_compared():
    kept = figures(1.0, 1.5)
    now = figures(1.0, 1.2)
    assert [move.block for move in moves(now, kept)] == ["A M=4 core"]
    now.blocks = {"A M=8 core": now.blocks["A M=4 core"]}
    assert not list(moves(now, kept))


def test_nothing_in_common_is_told():
    other = replace(figures(1.0, 1.5), blocks={})
    assert "nothing to compare" in report(figures(1.0, 1.5), other)


@pytest.mark.parametrize("contestant", ["ours", "floor"])
def test_what_was_measured_too_rarely_is_not_compared(contestant):
    kept = figures(1.0, 1.5)
    for rows in kept.blocks.values():
        rows[:] = [
            replace(row, num_clean=2) if row.contestant == contestant else row for row in rows
        ]
    assert not list(moves(figures(1.0, 3.0), kept))
    assert not list(moves(kept, figures(1.0, 3.0)))


def answers(**changes):
    fields = {"names": ["a", "b"], "num_plain": 2, "error": 0.0, "norm": 4.0}
    return [fields | changes]


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, ""),
        ({"error": 4e-8}, ""),
        ({"error": 4.0}, "differ from plain ones by 1.0e+00"),
        ({"error": math.nan}, "differ from plain ones"),
        ({"names": ["a"]}, "of 1 parameters, plain ones are 2"),
        ({"names": None}, ""),
    ],
)
def test_gradients_are_held_against_plain_ones(changes, wrong):
    found = check_gradients(Cell("ours", "A", "gpipe", 2), answers(**changes))[1]
    assert wrong in found and bool(wrong) == bool(found)


class Wrong:
    """Plain gradients, twice as large."""

    factor = 2.0

    def __init__(self, workload, cell):
        self.workload, self.cell = workload, cell

    def step(self):
        pass

    def gradients(self):
        return [(name, self.factor * g) for name, g in plain_gradients(self.workload).items()]

    def notes(self):
        return {"counts": [4, 4]}

    def close(self):
        pass


class Right(Wrong):
    factor = 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("entrant", "error"), [(Right, 0.0), (Wrong, 1.0)])
def test_a_worker_measures_how_wrong_gradients_are(tmp_path, entrant, error):
    worker = Worker({"somebody": entrant}, "tiny")
    path = tmp_path / "plain.pt"
    worker.answer({"do": "reference", "workload": "T", "path": str(path)})
    cell = Cell("somebody", "T", "way", 2)
    answer = worker.answer({"do": "open", "cell": cell.to_json(), "reference": str(path)})
    json.dumps(answer)
    found, wrong = check_gradients(cell, [answer])
    assert found == pytest.approx(error, abs=1e-6)
    assert bool(wrong) == (entrant is Wrong)
    ran = worker.answer({"do": "run", "cell": cell.key, "at_s": 0.0, "steps": 3})
    assert ran["cpu_s"] >= 0
    worker.answer({"do": "close", "cells": [cell.key]})
    assert not worker.cells


def test_one_rank_writes_the_reference_and_it_appears_whole(tmp_path, monkeypatch):
    """All ranks wrote one file at once; and one left half by an early end was taken for whole."""
    path = tmp_path / "plain.pt"
    request = {"do": "reference", "workload": "T", "path": str(path)}
    Worker({}, "tiny", rank=1).answer(request)
    assert not list(tmp_path.iterdir())
    save = torch.save

    def end_amid_writing(values, place):
        Path(place).write_bytes(b"half")
        raise OSError("no space is left")

    monkeypatch.setattr(torch, "save", end_amid_writing)
    with pytest.raises(OSError, match="no space"):
        Worker({}, "tiny").answer(request)
    assert not path.exists()
    monkeypatch.setattr(torch, "save", save)
    Worker({}, "tiny").answer(request)
    assert list(tmp_path.iterdir()) == [path]
    assert torch.load(path).keys() == plain_gradients(make_workload("T", "tiny")).keys()


def test_peak_is_of_what_was_held_and_forgotten():
    forget_peak()
    before = memory().now_bytes
    block = bytearray(64 << 20)
    del block
    assert memory().peak_bytes - before > 60 << 20
    forget_peak()
    assert memory().peak_bytes - before < 30 << 20


def test_the_machine_worked():
    assert machine_busy_s() > 0


@pytest.mark.slow
def test_who_cannot_be_loaded_is_absent_and_says_why(tmp_path):
    plain = Contestant("plain", "benchmarks.contestants.plain:Plain", 1)
    nobody = Contestant("nobody", "no_such_module:Nobody", 1)
    crew = WorkerPool([plain, nobody], "tiny", tmp_path)
    try:
        assert list(crew.absent) == ["nobody"] and "ModuleNotFoundError" in crew.absent["nobody"]
    finally:
        crew.close()


def test_a_crew_that_cannot_start_says_why(tmp_path):
    with pytest.raises(WorkerError, match="has ended"):
        WorkerPool([Contestant("nobody", "m:Nobody", 1, python="/bin/false")], "tiny", tmp_path)


def test_equal_processes_are_shared():
    crews = {each.name: each.crew for each in CONTESTANTS}
    assert len({crews[name] for name in ("floor", "ours", "torch", "ddp")}) == 1
    assert len({crews[name] for name in ("ours", "plain", "plain 2 threads")}) == 3
    other = Contestant("other", "m:Other", python="python")
    assert other.crew not in {*crews.values(), replace(other, name="another").crew}


@pytest.mark.parametrize(
    "words",
    [
        ["--workloads", "X"],
        ["--budget-s", "0"],
        ["--size", "huge"],
        ["--keep", "--size", "tiny"],
        ["--keep", "--workloads", "A"],
    ],
)
def test_options_that_measure_nothing_are_refused(words, capsys):
    with pytest.raises(SystemExit) as leaving:
        parsed(words)
    assert leaving.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_figures_are_kept_with_one_cell_a_line_and_read_again(tmp_path):
    """The file had 14,000 lines."""
    kept = load_figures(KEPT)
    kept.save(tmp_path / "figures.json")
    assert load_figures(tmp_path / "figures.json") == kept
    num_cells = sum(map(len, kept.blocks.values()))
    assert len((tmp_path / "figures.json").read_text().splitlines()) < 2 * num_cells


@pytest.mark.product
def test_contestants_run_side_by_side(tmp_path):
    """The whole way on the smallest model: start, check, turns, figures, a peer that breaks."""
    broken = Contestant("broken", "benchmarks.contestants.plain:Plain", 1, python="/bin/false")
    chosen = [each for each in CONTESTANTS if each.name in ("floor", "ours", "torch", "ddp")]
    said = []
    conductor = Conductor([*chosen, broken], tmp_path, size="tiny", say=said.append)
    cells = (
        floor_cell("B", 4),
        *our_cells("B", 4, ("gpipe", "zb_h1")),
        *torch_cells("B", 4, again=False)[:2],
        Cell("ddp", "B", "whole batch", 4),
        Cell("broken", "B", "whole batch", 4),
    )
    found = Figures()
    try:
        block = Block("B", 4, "core", tuple(replace(cell, wanted=1) for cell in cells))
        assert cost_s(block) > 0
        run_blocks(
            conductor, [block], found, budget_s=60, done=lambda figures: None, say=said.append
        )
    finally:
        conductor.close()
    rows = {row.name: row for row in found.blocks["B M=4 core"]}
    assert "has ended" in rows.pop("broken whole batch").failed
    assert all(row.median_s for row in rows.values()), said
    assert all(row.gradient_error < 1e-5 for name, row in rows.items() if name != "floor local")
    assert rows["ours gpipe"].limit_s > rows["floor local"].median_s
    assert rows["torch GPipe"].bubble == pytest.approx(rows["ours gpipe"].bubble, abs=0.2)
    assert set(found.versions) == {"floor", "ours", "torch", "ddp"}


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_processes_are_stopped_while_they_wait(tmp_path):
    crew = WorkerPool(
        [Contestant("plain", "benchmarks.contestants.plain:Plain", 1)], "tiny", tmp_path
    )
    try:
        crew.ask({"do": "close", "cells": []})
        pid = crew._processes[0].pid
        deadline_s = time.monotonic() + 10.0
        while state_of(pid) != "T" and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert state_of(pid) == "T"
        crew.ask({"do": "close", "cells": []})
    finally:
        crew.close()
    assert crew._processes[0].returncode == 0


# One that has started another process, which knows nothing of who conducts.
PARENT = """
import subprocess
Parent, child = object, subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
"""

CONDUCTOR = """
import sys, pathlib
from benchmarks.cells import Contestant
from benchmarks.worker_pool import WorkerPool
folder = pathlib.Path(sys.argv[1])
crew = WorkerPool([Contestant("one", "parent:Parent", 1)], "tiny", folder, (str(folder),))
crew.ask({"do": "close", "cells": []})
(log,) = folder.glob("*.log")
print(crew._processes[0].pid, log.read_text(), end="", flush=True)
if sys.argv[2] == "closes":
    crew.close()
sys.stdin.read()
"""


def has_ended(pid):
    try:
        return state_of(pid) == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.slow
@pytest.mark.parametrize("end", ["closes", "is killed"])
def test_processes_and_their_children_end_with_who_conducts_them(tmp_path, until, end):
    """The kernel kills the first of them alone: children stayed stopped for good."""
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, "-c", CONDUCTOR, str(tmp_path), end]
    conductor = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    pids = [int(word) for word in conductor.stdout.readline().split()]
    try:
        assert len(pids) == 2
        if end == "is killed":
            conductor.kill()
        until(lambda: all(map(has_ended, pids)), 10, f"processes {pids} ended")
    finally:
        conductor.kill()
        conductor.communicate()
        for pid in pids:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_that_ends_is_reported(tmp_path):
    contestant = Contestant("plain", "benchmarks.contestants.plain:Plain", 1)
    crew = WorkerPool([contestant], "tiny", tmp_path)
    try:
        with pytest.raises(WorkerError, match="unknown request"):
            crew.ask({"do": "something else"})
        crew._streams[0].shutdown(socket.SHUT_WR)
        with pytest.raises(WorkerError, match="has ended"):
            crew.ask({"do": "close", "cells": []})
    finally:
        crew.close()


class Ends(Right):
    """Takes its process with it in the first step after the check."""

    num_steps = 0

    def step(self):
        self.num_steps += 1
        if self.num_steps > 2:
            os._exit(1)


@pytest.mark.slow
@pytest.mark.parametrize("num_refused", [0, 2])
def test_who_ends_a_process_leaves_the_others_what_they_have(tmp_path, monkeypatch, num_refused):
    """Both stand in one process; one ends it amid the block, and it may not start at once."""
    starts = []

    def start(*args):
        starts.append(args)
        if 1 < len(starts) <= 1 + num_refused:
            raise WorkerError("the port is taken")
        return WorkerPool(*args)

    monkeypatch.setattr(rounds, "WorkerPool", start)
    here = str(Path(__file__).parent)
    both = [Contestant(name, f"test_bench:{name}", 1) for name in ("Right", "Ends")]
    conductor = Conductor(both, tmp_path, size="tiny", paths=(here,), say=lambda text: None)
    try:
        cells = tuple(Cell(name, "T", "way", 2, wanted=3) for name in ("Right", "Ends"))
        right, ends = conductor.measure(Block("T", 2, "core", cells), time.monotonic() + 60.0)
    finally:
        conductor.close()
    assert "has ended" in ends.failed
    assert len(starts) == 2 + num_refused
    assert not right.failed and len(right.samples) >= 3
    assert not conductor.absent


class Hangs(Right):
    """Hangs when a second process opens it."""

    def __init__(self, workload, cell):
        super().__init__(workload, cell)
        marks = Path(os.environ["MARKS"])
        (marks / str(os.getpid())).touch()
        if len(list(marks.iterdir())) > 1:
            time.sleep(600.0)


@pytest.mark.slow
def test_who_hangs_when_opened_again_is_ended_and_the_others_go_on(tmp_path, monkeypatch):
    """It was waited for as long as for any answer, 120 s, once for each such cell."""
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setenv("MARKS", str(marks))
    monkeypatch.setattr(rounds, "_REOPEN_S", 2.0)
    here = str(Path(__file__).parent)
    names = ("Right", "Hangs", "Ends")
    crew = [Contestant(name, f"test_bench:{name}", 1) for name in names]
    conductor = Conductor(crew, tmp_path, size="tiny", paths=(here,), say=lambda text: None)
    begin_s = time.monotonic()
    try:
        cells = tuple(Cell(name, "T", "way", 2, wanted=3) for name in names)
        right, hangs, ends = conductor.measure(Block("T", 2, "core", cells), begin_s + 60.0)
        alive = [pid for pid in map(int, os.listdir(marks)) if Path(f"/proc/{pid}").exists()]
    finally:
        conductor.close()
    assert "has ended" in ends.failed
    assert "gave no answer in" in hangs.failed
    assert not right.failed and len(right.samples) >= 3
    assert len(list(marks.iterdir())) == 2 and not alive
    assert time.monotonic() - begin_s < 90.0 * patience()


@pytest.mark.parametrize(("is_late", "reopened"), [(False, ["seen", "new"]), (True, ["new"])])
def test_past_the_deadline_only_what_was_not_seen_is_opened_again(
    tmp_path, monkeypatch, is_late, reopened
):
    class Answering:
        version, absent = "1", {}

        def __init__(self, *args):
            self.opened = []

        def ask(self, request, timeout_s=0.0):
            self.opened.append(request["cell"]["variant"])
            return [{"peak_bytes": 1, "step_s": 1.0, "names": None}]

        def close(self):
            pass

    monkeypatch.setattr(rounds, "WorkerPool", Answering)
    conductor = Conductor([Contestant("one", "m:One", 1)], tmp_path)
    lost, seen, new = (
        Measured(Cell("one", "T", way, 2), is_open=True) for way in ("lost", "seen", "new")
    )
    seen.samples.append(sample(1.0))
    deadline_s = time.monotonic() + (-1.0 if is_late else 60.0)
    course = rounds._Course([lost, seen, new], "plain.pt", deadline_s)
    conductor._lose(lost, course, "has ended")
    (crew,) = conductor.crews.values()
    assert crew.opened == reopened
    assert lost.failed and not seen.failed and not new.failed


class Sitting:
    """A crew that does nothing, and notes what it is asked."""

    version, absent = "1", {}

    def __init__(self, *args):
        self.asked = []

    def ask(self, request, timeout_s=0.0):
        if request["do"] == "open":
            self.asked.append(f"open {request['cell']['variant']}")
            return [{"peak_bytes": 100 * len(self.asked), "step_s": 1.0, "names": None}]
        self.asked.append(request["do"])
        return [{}]

    def run(self, key, num_steps):
        self.asked.append(f"run {key.split()[-1]}")
        return [{"wall_s": 1.0, "cpu_s": 0.0, "num_preempted": 0}]

    def close(self):
        pass


def test_cells_are_opened_anew_in_each_sitting_the_last_first(tmp_path, monkeypatch):
    """Where a cell's memory lay decided for all of its steps."""
    monkeypatch.setattr(rounds, "WorkerPool", Sitting)
    monkeypatch.setattr(rounds, "is_disturbed", lambda wall_s, foreign_s: False)
    conductor = Conductor([Contestant("one", "m:One", 1)], tmp_path)
    cells = tuple(Cell("one", "T", way, 2, wanted=wanted) for way, wanted in (("a", 3), ("b", 2)))
    block = Block("T", 2, "core", cells)
    first, second = conductor.measure(block, time.monotonic() + 60.0, 4, num_sittings=2)
    (crew,) = conductor.crews.values()
    begin, middle = crew.asked.index("open a"), crew.asked.index("close")
    assert sorted(crew.asked[begin + 2 : middle]) == ["run a", "run a", "run b"]
    assert crew.asked[middle + 1 : middle + 3] == ["open b", "open a"]
    assert sorted(crew.asked[middle + 3 :]) == ["close", "run a", "run b"]
    assert (len(first.clean), len(second.clean)) == (3, 2)
    assert first.peak_bytes == (sum(first.peaks[0] + first.peaks[1]) / 2,)


def test_no_sitting_is_given_more_than_its_share_of_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "WorkerPool", Sitting)
    conductor = Conductor([Contestant("one", "m:One", 1)], tmp_path)
    shares = []

    def sit(course, num_rounds):
        shares.append(course.deadline_s - time.monotonic())

    monkeypatch.setattr(conductor, "_sit", sit)
    block = Block("T", 2, "core", (Cell("one", "T", "a", 2),))
    conductor.measure(block, time.monotonic() + 60.0, num_sittings=3)
    assert shares == pytest.approx([20.0, 30.0, 60.0], abs=1.0)
