"""Functions for the pages of the course: predict, run a command, show a picture, give the answer.

Pictures and notebooks go to `experiments/course/out`, which git ignores.
"""

import contextlib
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
OUT: Final = Path(__file__).resolve().parent / "out"
TIMEOUT_S: Final = 120.0


class Simulated(NamedTuple):
    """The numbers that `gpipe_hpc.draw` prints; the bubble is a share of the total time."""

    makespan: float
    bubble: float
    peak_activations: tuple[float, ...]


def predict(question: str) -> str | None:
    """Ask for a prediction in a terminal or a notebook; return None if neither is there."""
    is_notebook = "ipykernel" in sys.modules
    if not is_notebook and not sys.stdin.isatty():
        return None
    try:
        return input(f"{question} ").strip() or None
    except (EOFError, NotImplementedError, RuntimeError):  # a notebook that runs unattended
        return None


def run(command: str, *, ranks: int = 1, lines: str = "", may_fail: bool = False) -> str:
    """Run a command in the top folder of the repository; print and return its output.

    Args:
        command: a module and its arguments, as after `python -m`
        ranks: number of processes; several are started by torchrun
        lines: a regular expression; only matching lines are printed; empty for all lines
        may_fail: whether an exit code other than 0 is part of the exercise
    """
    words = shlex.split(command)
    shown, started = ["python", "-m", *words], [sys.executable, "-m", *words]
    if ranks > 1:
        words = ["--standalone", "--nproc_per_node", str(ranks), "-m", *words]
        shown, started = (
            ["torchrun", *words],
            [sys.executable, "-m", "torch.distributed.run", *words],
        )
    print(f"$ {shlex.join(shown)}", flush=True)
    code, text = _output(started)
    if code and not may_fail:
        raise RuntimeError(f"the command ended with exit code {code}:\n{text}")
    wanted = [line for line in text.splitlines() if re.search(lines, line)]
    print("\n".join(wanted))
    if len(wanted) < len(text.splitlines()):
        print("(other lines left out)")
    return text


def _output(command: Sequence[str]) -> tuple[int, str]:
    """Return exit code and output; end all started processes, also after Ctrl-C."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1"} | os.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        so_far = (error.output or b"").decode(errors="replace")
        raise RuntimeError(f"the command took over {TIMEOUT_S:g} s:\n{so_far}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, text


def found(pattern: str, text: str) -> str:
    """Return the part of a text that the first group of a regular expression matches."""
    match = re.search(pattern, text, re.M)
    if match is None:
        raise ValueError(f"found no {pattern!r} in:\n{text}")
    return match[1]


def simulated(text: str) -> Simulated:
    """Parse the output of `gpipe_hpc.draw`."""
    bubble = re.search(r"makespan ([\d.]+), bubble ([\d.]+)%", text)
    peaks = re.search(r"live activations .*peaks ([\d. ]+)", text)
    if bubble is None or peaks is None:
        raise ValueError(f"no makespan, bubble or peaks in:\n{text}")
    return Simulated(
        float(bubble[1]), float(bubble[2]) / 100, tuple(float(each) for each in peaks[1].split())
    )


def simulate(settings: str) -> Simulated:
    """Simulate a schedule with `gpipe_hpc.draw`; return its numbers."""
    return simulated(run(f"gpipe_hpc.draw {settings}", lines="makespan|peaks"))


def draw(name: str, settings: str) -> Simulated:
    """Simulate a schedule with `gpipe_hpc.draw`, show its picture, return its numbers."""
    step = simulate(settings)
    path = OUT / f"{name}.svg"
    OUT.mkdir(exist_ok=True)
    with contextlib.redirect_stdout(None):
        run(f"gpipe_hpc.draw {settings} draw.out={path.relative_to(ROOT)}")
    show(path)
    return step


def planned(text: str) -> list[dict[str, float]]:
    """Parse the output of `gpipe_hpc.plan`: bytes of each rank by the name of the column."""
    rows = iter(text.splitlines())
    names = next(row for row in rows if row.startswith("rank") and "activations" in row)
    columns = re.split(r"\s{2,}", names.strip())
    found: list[dict[str, float]] = []
    for row in rows:
        fields = re.split(r"\s{2,}", row.strip())
        if len(fields) != len(columns):
            return found
        found.append(dict(zip(columns, map(in_bytes, fields), strict=True)))
    return found


def in_bytes(text: str) -> float:
    """Return a number as the commands print it: `445,696`, `1.78 MB`."""
    number, _, unit = text.replace(",", "").partition(" ")
    return float(number) * {"": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]


def show(path: Path) -> None:
    """Show an SVG picture in a notebook; in a terminal, print its path."""
    if "ipykernel" in sys.modules:
        from IPython.display import SVG, display

        display(SVG(filename=str(path)))
    else:
        print(f"picture: {path.relative_to(ROOT)} (open it in a browser)", flush=True)


def picture(name: str, svg: str) -> None:
    """Write an SVG picture and show it."""
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}.svg"
    path.write_text(svg, "utf-8")
    show(path)


def check(what: str, value: float, expected: float, tolerance: float = 1e-9) -> None:
    """Print a counted or simulated number next to the expected one; fail if they differ.

    The tolerance is relative; commands print a few digits only.
    """
    print(f"{what}: {value:g} (expected: {expected:g})")
    if abs(value - expected) > tolerance * max(abs(expected), 1e-12):
        raise AssertionError(
            f"{what} is {value:g}, expected {expected:g}; "
            "read 'If the number does not come out' below"
        )


def answer(text: str, mine: str | None = None) -> None:
    """Print the answer, and the prediction if there was one."""
    print(f"ANSWER: {text}" + (f" (you predicted: {mine})" if mine else ""))


def spread(values: Sequence[float], unit: str, factor: float = 1.0) -> str:
    """Return the median of measured values, with their quartiles, as text."""
    low, middle, high = (f"{value * factor:.3g}" for value in quartiles(values))
    return f"{middle} {unit} (quartiles {low} and {high}, {len(values)} rounds)"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
