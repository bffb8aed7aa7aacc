"""The progress line: its words, and how often it comes where there is no terminal."""

import io

from rich.console import Console

from gpipe_hpc.training.progress import Progress

SCALARS = {"loss": 2.34567, "samples_per_s": 123.44, "bubble": 0.1115, "step_time_s": 0.5}


def test_line_names_all_that_a_watcher_wants():
    progress = Progress(0, 300, 10, Console(file=io.StringIO()))
    progress.update(1, SCALARS)
    assert progress.line(100, SCALARS) == (
        "step 100/300  loss 2.3457  123.4 samples/s  bubble 11.2%  1:40 left"
    )


def test_unknown_values_are_left_out():
    progress = Progress(0, 50, 10, Console(file=io.StringIO()))
    assert progress.line(3, {"loss": 1.0, "bubble": None}) == "step  3/50  loss 1.0000"


def test_time_left_follows_recent_steps_and_ignores_one_slow_step():
    progress = Progress(0, 7300, 10, Console(file=io.StringIO()))
    for step, seconds in enumerate([60.0, 0.5, 0.5, 0.5], start=1):
        progress.update(step, {"step_time_s": seconds})
    assert progress.line(100, {}) == "step  100/7300  1:00:00 left"


def test_without_terminal_every_few_steps_first_and_last():
    out = io.StringIO()
    with Progress(20, 33, 5, Console(file=out, width=20)) as progress:
        for step in range(21, 34):
            progress.update(step, SCALARS)
        progress.say("step 33: checkpoint [saved] in /a/path/longer/than/the/screen")
    lines = out.getvalue().splitlines()
    assert [line.split("/")[0] for line in lines[:-1]] == [
        "step 21",
        "step 25",
        "step 30",
        "step 33",
    ]
    assert lines[-1] == "step 33: checkpoint [saved] in /a/path/longer/than/the/screen"


def test_on_a_terminal_the_line_stays_in_place():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Progress(0, 30, 10, console) as progress:
        for step in (1, 2, 3):
            progress.update(step, SCALARS)
    text = out.getvalue()
    assert all(f"step  {step}/30" in text for step in (1, 2, 3))
    assert "\x1b[2K" in text  # the line before is wiped
