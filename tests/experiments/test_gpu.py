"""The command of experiments/gpu: what parts may do to one another, what it reads off a trace."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.gpu import __main__ as command
from experiments.gpu.running import LEFT, Claim, Findings, Outcome, Part, run_part
from experiments.gpu.sizes import SIZES, size_for
from experiments.gpu.trace import beside, lanes, united, work_of
from tests.bare_environment import bare_environment

ROOT = Path(__file__).parents[2]

BEHAVIOURS = """
import argparse, os, subprocess, sys, time
from pathlib import Path
from experiments.gpu.running import Findings, enter

parser = argparse.ArgumentParser()
parser.add_argument("--do", required=True)
parser.add_argument("--found", type=Path, required=True)
args = parser.parse_args()
enter()
rank = int(os.environ.get("RANK", "0"))
findings = Findings(args.found.with_suffix(f".{rank}") if rank else args.found)
findings.add("begun", rank)
print("rank", rank, "says hello", flush=True)
if args.do == "end":
    findings.add("world", os.environ.get("WORLD_SIZE"))
if args.do == "fail" and rank == 1:
    raise ValueError("planted")
if args.do == "abort":
    os.abort()
if args.do in ("hang", "fail"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    findings.add("child", child.pid)
    time.sleep(600)
"""


@pytest.fixture
def part(tmp_path, monkeypatch):
    """Return what makes a part of processes that behave as told."""
    (tmp_path / "behaving.py").write_text(BEHAVIOURS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "17")  # a launcher's, which is none of a part's business

    def make(do, ranks=1):
        return Part(do, "", "behaving", 60, ("--do", do), ranks=ranks)

    return make


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_part_that_ends_leaves_what_it_found(part):
    outcome = run_part(part("end"), 60)
    assert (outcome.state, outcome.found) == ("done", {"begun": 0, "world": None})
    two = run_part(part("end", ranks=2), 60)
    assert (two.state, two.found) == ("done", {"begun": 0, "world": "2"})


def test_a_part_that_hangs_is_ended_with_its_children_and_says_where_it_was(part):
    """What it found so far, and the stack of its threads, stand in the outcome."""
    outcome = run_part(part("hang"), 11)
    assert outcome.state == "out of time" and outcome.seconds < 30
    assert outcome.found["begun"] == 0
    assert "behaving.py" in outcome.tail and "Timeout" in outcome.tail
    deadline = time.monotonic() + 10
    while is_running(outcome.found["child"]):
        assert time.monotonic() < deadline, "the child of a killed part still runs"
        time.sleep(0.05)


def test_a_rank_that_fails_ends_the_others_soon(part):
    outcome = run_part(part("fail", ranks=2), 60)
    assert outcome.state == "failed" and outcome.seconds < 50
    assert outcome.reason == "rank 1 ended with exit code 1"
    assert "ValueError: planted" in outcome.tail and "--- rank 0" in outcome.tail


def test_a_process_that_dies_is_told_by_its_signal(part):
    assert run_part(part("abort"), 60).reason == "rank 0 ended with signal SIGABRT"


def test_one_file_has_what_came_of_each_part(part, tmp_path, monkeypatch):
    """A failure, a hang and parts left out do not stop what is behind them."""
    broken = Part("broken", "", "no.such.module", 60)
    devices = Part("devices", "", "behaving", 60, ("--do", "end"), needs_devices=2)
    chosen = [part("fail", ranks=2), broken, devices, part("end")]
    out = tmp_path / "all.json"
    command.run_all(chosen, "cuda", out, 200, lambda line: None)
    whole = json.loads(out.read_text())
    states = {name: each["state"] for name, each in whole["parts"].items()}
    assert states == {"fail": "failed", "broken": "failed", "devices": "left out", "end": "done"}
    assert any("planted" in line for line in whole["parts"]["fail"]["output"])
    assert any(
        "no.such.module" in line or "'no'" in line for line in whole["parts"]["broken"]["output"]
    )
    assert whole["parts"]["devices"]["reason"] == "needs 2 devices, there are 0"
    assert any(line.startswith("broken: failed") for line in whole["summary"])
    nothing = command.run_all(chosen, "cuda", out, 0, lambda line: None)
    assert {each.state for each in nothing.values()} == {"left out"}


def test_what_fails_within_a_part_stands_in_its_place(tmp_path):
    findings = Findings(tmp_path / "found.json")
    with findings.attempt("first"):
        raise ValueError("planted")
    findings.add("second", 2)
    assert json.loads((tmp_path / "found.json").read_text()) == {
        "first": {"failed": "ValueError: planted"},
        "second": 2,
    }


def test_a_claim_holds_or_not_or_was_not_found():
    assert Claim("ours", 1.01, 1.02).holds is True
    assert Claim("ours", 1.03, 1.02).holds is False
    assert Claim("ours", None, 1.02).holds is None
    assert Claim("share", 0.7, 0.8, at_least=True).holds is False
    assert str(Claim("ours", 1.03, 1.02)) == "DOES NOT HOLD: ours: 1.03, at most 1.02 wanted"


def test_claims_are_read_off_what_the_parts_wrote():
    found = {
        "one rank": Outcome(
            "done",
            found={
                "contestants": {"ours": {"over plain": 1.01}, "ours, virtual stages": {}},
                "gradient difference of ours": {"failed": "planted"},
            },
        ),
        "memory": Outcome(
            "done",
            found={"size": "xl", LEFT: 0, "offload": {"over_plan": 1.2, "active_over_plan": 1.5}},
        ),
        "exactness": Outcome("failed", found={"failed": 3}),
    }
    told = {str(claim).split(": ", 1)[0] + ", " + claim.what for claim in command.claims(found)}
    assert told == {
        "holds, one rank: ours over the plain loop",
        "NOT FOUND, one rank: virtual stages over plain accumulation",
        "NOT FOUND, one rank: relative difference of gradients",
        "NOT FOUND, one rank: waits for the device in a step of ours",
        "holds, memory: left by measuring layers, bytes",
        "DOES NOT HOLD, memory: peak over plan, offload",
        "holds, memory: peak over plan, offload",
        "DOES NOT HOLD, memory: peak with memory that copies still read, over plan, offload",
        "DOES NOT HOLD, exactness: tests that fail",
    }


def test_the_limits_of_all_parts_leave_time_for_the_last():
    """With one device, as is usual; two take what the compiled part has left."""
    limits = {p.name: p.limit_s for p in command.parts("cuda", in_little=False)}
    last = limits.pop("one rank, compiled")
    del limits["own backend, two ranks"], limits["large model"]  # of what is left, or alone
    assert sum(limits.values()) + 60 <= command.MOST_S < 600 < sum(limits.values()) + last


def test_the_largest_size_that_fits_is_taken():
    assert size_for("auto", int(130e9), True)[0] == "xl"
    assert size_for("auto", int(83e9), True)[0] == "large"
    assert size_for("auto", int(1e9), True)[0] == "tiny"
    assert size_for("auto", None, False)[0] == "tiny"
    assert size_for("auto", int(130e9), True, "medium")[0] == "medium"
    assert size_for("small", None, False)[1] is SIZES["small"]


def event(cat, name, stream, ts, dur):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"stream": stream}}


TRACE = [
    event("kernel", "gemm", 7, 0, 100),
    event("kernel", "gemm", 7, 120, 80),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 20, 50, 100),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 21, 200, 40),
    event("gpu_memcpy", "Memcpy DtoD", 7, 240, 10),
    event("cpu_op", "aten::mm", 7, 0, 400),
    {"ph": "M", "name": "process_name"},
]


def test_copies_beside_kernels_are_counted_by_stream():
    """Of 140 us of copies between host and device, 50 + 30 have a kernel of another stream."""
    found = beside(work_of(TRACE))
    assert found["copies"] == 2
    assert found["copies_ms"] == pytest.approx(0.140)
    assert found["copies_beside_kernels_ms"] == pytest.approx(0.080)
    assert found["kernels_ms"] == pytest.approx(0.180)
    assert found["share_beside"] == pytest.approx(80 / 140)
    own = [event("kernel", "gemm", 7, 0, 100), event("gpu_memcpy", "Memcpy DtoH", 7, 0, 100)]
    assert beside(work_of(own))["share_beside"] == 0
    assert beside([])["share_beside"] is None


def test_spans_are_united():
    assert united([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


def test_each_stream_has_a_line():
    drawn = lanes(work_of(TRACE), columns=25)
    assert [line[: line.index("|")] for line in drawn] == [
        "stream   20 ",
        "stream   21 ",
        "stream    7 ",
    ]
    assert drawn[0].endswith("|     <<<<<<<<<<<         |")
    assert drawn[1].endswith("|                    >>>>>|")
    assert drawn[2].endswith("|########### #########   c|")
    assert lanes([]) == []


@pytest.mark.product
@pytest.mark.timeout(900)
def test_the_command_runs_on_a_cpu(tmp_path, environ):
    """All parts, in little, with torch and numpy alone: each is done, and gradients are plain ones.

    What they call of the package mypy looks at in each check; what one part may do to the others
    is tried above.
    """
    out = tmp_path / "gpu.json"
    run = subprocess.run(
        [sys.executable, "-m", "experiments.gpu", "--device", "cpu", "--out", str(out)],
        cwd=ROOT,
        env=bare_environment(environ, tmp_path),
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    whole = json.loads(out.read_text())
    states = {name: each["state"] for name, each in whole["parts"].items()}
    assert states.pop("own backend, two ranks") == "left out"
    assert set(states.values()) == {"done"}, (states, run.stdout)
    assert whole["parts"]["two ranks, one device"]["found"]["layouts"] >= 12
    assert whole["parts"]["exactness"]["found"]["failed"] == 0
    assert whole["parts"]["exactness"]["found"]["passed"] >= 2
    assert all(
        claim["holds"] is not False for claim in whole["claims"] if "gradients" in claim["what"]
    )
