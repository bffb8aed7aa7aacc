"""The progress line: its words, what it smooths, and how it stands among other output."""

import io
import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest
from rich.console import Console

from gpipe_hpc.trainer.figures.progress import Progress

SCALARS = {"loss": 2.34567, "samples_per_s": 123.44, "bubble": 0.1115, "step_time_s": 0.5}


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def quiet(first, last, every=10, clock=None):
    return Progress(first, last, every, Console(file=io.StringIO()), clock or Clock())


def test_line_names_all_that_a_watcher_wants():
    progress = quiet(0, 300)
    progress.update(1, SCALARS)
    assert progress.line(100, SCALARS) == (
        "step 100/300  loss 2.3457  123.4 samples/s  bubble 11.2% of total  1:40 left"
    )


def test_of_text_it_says_tokens():
    progress = quiet(0, 300)
    progress.update(1, SCALARS | {"tokens_per_s": 15800.4})
    assert progress.line(1, {}) == "step   1/300  15,800 tokens/s  bubble 11.2% of total  2:30 left"


def test_it_says_the_share_of_peak_and_the_memory_of_ranks():
    """Memory stands last: a narrow terminal cuts it, not the time that is left."""
    progress = quiet(0, 300)
    scalars = SCALARS | {"share_of_peak": 0.413, "peak_memory_bytes": 2.4e9}
    scalars |= {"peak_memory_rank": 3, "least_peak_memory_bytes": 1.12e9}
    progress.update(1, scalars)
    assert progress.line(1, scalars) == (
        "step   1/300  loss 2.3457  123.4 samples/s  41.3% of peak  bubble 11.2% of total  "
        "2:30 left  memory 1.12 GB to 2.40 GB (rank 3)"
    )
    alike = scalars | {"least_peak_memory_bytes": 2.4e9}
    assert progress.line(1, alike).endswith("2:30 left  memory 2.40 GB")
    assert "memory" not in progress.line(1, SCALARS)
    each = {
        "peak_memory_bytes/0": 1.12e9,
        "peak_memory_bytes/1": 1.5e9,
        "peak_memory_bytes/2": 2.4e9,
    }
    told = progress.line(1, scalars | each)
    assert told.endswith("memory 1.12 GB, 1.50 GB, 2.40 GB by rank")
    same = dict.fromkeys(each, 2.4e9)
    assert progress.line(1, alike | same).endswith("2:30 left  memory 2.40 GB")


def test_unknown_values_are_left_out():
    assert quiet(0, 50).line(3, {"loss": 1.0, "bubble": None}) == "step  3/50  loss 1.0000"


def test_rates_are_those_of_the_last_seconds_not_of_one_step():
    """Samples a second jumped from step to step."""
    progress = quiet(0, 1000)
    for step in range(1, 101):
        took_s = 0.5 if step % 2 else 1.5
        progress.update(step, {"step_time_s": took_s, "samples_per_s": 30 / took_s})
        if step >= 20:
            rate = float(re.search(r"([\d.]+) samples/s", progress.line(step, {}))[1])
            assert rate == pytest.approx(30, abs=1.5)
    for step in range(101, 121):
        progress.update(step, {"step_time_s": 1.0, "samples_per_s": 7.0})
    assert "7.0 samples/s" in progress.line(120, {})  # what is long ago counts no more
    progress.update(121, {"step_time_s": 60.0, "samples_per_s": 2.0})
    assert "2.0 samples/s" in progress.line(121, {})


def test_time_left_follows_recent_steps_and_ignores_one_slow_step():
    progress = quiet(0, 7300)
    for step, seconds in enumerate([60.0, 0.5, 0.5, 0.5], start=1):
        progress.update(step, {"step_time_s": seconds})
    assert progress.line(100, {}) == "step  100/7300  1:00:00 left"


def shown_steps(out):
    return [int(re.match(r"step +(\d+)/", line)[1]) for line in out.getvalue().splitlines()]


def run_quietly(first, last, every, step_s):
    out, clock = io.StringIO(), Clock()
    with Progress(first, last, every, Console(file=out, width=20), clock) as progress:
        for step in range(first + 1, last + 1):
            clock.now_s += step_s
            progress.update(step, SCALARS)
    return shown_steps(out)


def test_without_terminal_every_few_steps_first_and_last():
    assert run_quietly(20, 33, 5, 1.0) == [21, 25, 30, 33]


def test_without_terminal_a_fast_run_floods_nothing_and_a_slow_one_is_heard():
    shown = run_quietly(0, 10000, 10, 0.003)  # half a minute
    assert 20 <= len(shown) <= 100 and shown[:3] == [1, 10, 20]
    assert run_quietly(0, 7, 100, 70.0) == [1, 2, 3, 4, 5, 6, 7]


def test_what_is_said_stays_as_it_is():
    out = io.StringIO()
    with Progress(0, 3, 1, Console(file=out, width=20), Clock()) as progress:
        progress.say("step 33: checkpoint [saved] in /a/path/longer/than/the/screen")
    assert out.getvalue() == "step 33: checkpoint [saved] in /a/path/longer/than/the/screen\n"


def test_on_a_terminal_the_line_stays_in_place():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=100)
    with Progress(0, 30, 10, console, clock) as progress:
        for step in (1, 2, 3, 4):
            clock.now_s += 0.07
            progress.update(step, SCALARS)
    text = out.getvalue()
    assert [s for s in (1, 2, 3, 4) if f"step  {s}/30" in text] == [1, 3, 4]  # the last at the end
    assert "\x1b[2K" in text  # the line before is wiped


OUTPUT = """
    import logging, sys, time
    from pathlib import Path
    from gpipe_hpc.trainer.logs import rank_log
    from gpipe_hpc.trainer.figures.progress import Progress
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    log = logging.getLogger("gpipe_hpc.train")
    with rank_log(folder, rank, [rank]):
        if rank == 1:
            log.warning("the other rank warns")
            sys.exit()
        with Progress(0, 40, 10) as progress:
            for step in range(1, 5):
                time.sleep(0.11)
                progress.update(step, {"loss": 1.0, "step_time_s": 0.1, "samples_per_s": 9.0})
                if step == 2:
                    log.info("saved something at %s", "x" * 70)
                    progress.say("step 2: validation loss 1.5")
                if step == 3:
                    print("to standard error", file=sys.stderr)
                    sys.stderr.flush()
                    (folder / "here").touch()
                    while not (folder / "go").exists():
                        time.sleep(0.01)
        log.info("the end")
"""


def screen_of(text):
    """Return the lines that a terminal shows once it has printed a text."""
    lines, row, column = [""], 0, 0
    for code, char in re.findall(r"(\x1b\[[?\d;]*[a-zA-Z])|([\s\S])", text):
        if code == "\x1b[2K":
            lines[row] = ""
        elif code == "\x1b[1A":
            row -= 1
        elif char == "\r":
            column = 0
        elif char == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif char:
            lines[row] = lines[row].ljust(column)[:column] + char + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


def test_log_lines_of_any_rank_stand_on_lines_of_their_own(tmp_path, until, repository):
    """They were glued to the end of the progress line."""
    script = tmp_path / "output.py"
    script.write_text(textwrap.dedent(OUTPUT))
    ours, theirs = pty.openpty()

    def start(rank):
        return subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path)],
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm", "PYTHONPATH": str(repository), "COLUMNS": "100"},
        )

    first = start(0)
    until((tmp_path / "here").exists, 60, "rank 0 shows its line")
    assert start(1).wait(60) == 0
    (tmp_path / "go").touch()
    assert first.wait(60) == 0
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # the other end is closed and all is read
        pass
    finally:
        os.close(ours)
    lines = screen_of(shown.decode())
    starts = [re.sub(r"^\d{4}-\d\d-\d\d [\d:,]+ ", "", line)[:28] for line in lines]
    assert starts == [
        "INFO rank 0 stage 0 gpipe_hp",
        "step 2: validation loss 1.5",
        "to standard error",
        "WARNING rank 1 stage 1 gpipe",
        "step  4/40  loss 1.0000  9.0",
        "INFO rank 0 stage 0 gpipe_hp",
    ]
