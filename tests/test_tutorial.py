"""Run the commands of `docs/tutorial.md` and compare their output with the page."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"
LIMIT_S = 240.0
FENCE = re.compile(r"^```(sh|python|text)\n(.*?)^```$", re.S | re.M)
NOT_RUN = re.compile(r"<!-- not run: [^>]+-->\s*\Z")
STOPPED = re.compile(r"<!-- Ctrl-C after: (.+?) -->\s*\Z")
INTO = re.compile(r"into `([\w.]+)`:\s*\Z")


class Block(NamedTuple):
    """A fenced code block; `said` is the text between the previous block and this one."""

    kind: str
    text: str
    said: str


def blocks() -> Iterator[Block]:
    page = PAGE.read_text("utf-8")
    end = 0
    for match in FENCE.finditer(page):
        yield Block(match[1], match[2], page[end : match.start()])
        end = match.end()


def alike(line: str) -> str:
    """Normalize an output line: numbers, units and white space may differ between runs.

    From a row of a measured timeline only the rank remains.
    """
    line = re.sub(r"^(rank \d+) [F.].*", r"\1", line.strip())
    line = re.sub(r"\d+([.:,]\d+)*", "#", line)
    line = re.sub(r"# (ms|us|s|min)\b", "# s", line)
    return re.sub(r"\s+", " ", line)


def run(script: str, folder: Path, environment: dict[str, str], stop_after: str | None) -> str:
    """Run shell lines as a user would; send Ctrl-C once the output matches `stop_after`."""
    output = folder / "output.txt"
    with output.open("wb") as file:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + LIMIT_S
            is_asked = False
            while shell.poll() is None:
                said = output.read_text(errors="replace")
                assert time.monotonic() < deadline, f"{script} takes too long, having said:\n{said}"
                if stop_after is not None and not is_asked and re.search(stop_after, said):
                    # A terminal sends Ctrl-C to all processes in the foreground.
                    os.killpg(shell.pid, signal.SIGINT)
                    is_asked = True
                time.sleep(0.1)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
    said = output.read_text(errors="replace")
    assert (shell.returncode == 0) == (stop_after is None), f"{script}\n{said}"
    return said


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_tutorial_works_as_it_stands(tmp_path, repository, environ):
    """Each block is a file, a command or its output; commands succeed and print this output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    environment = environ | {"PATH": path, "PYTHONPATH": str(repository)}
    output: list[str] = []
    num_run = num_shown = 0
    for block in blocks():
        if NOT_RUN.search(block.said):
            output = []
        elif block.kind == "sh":
            stop = STOPPED.search(block.said)
            said = run(block.text, tmp_path, environment, stop and stop[1])
            output = [alike(line) for line in said.splitlines()]
            num_run += 1
        elif block.kind == "python":
            into = INTO.search(block.said)
            assert into is not None, f"it is not said where this goes:\n{block.text}"
            (tmp_path / into[1]).write_text(block.text)
        elif output:
            for line in block.text.splitlines():
                assert any(alike(line) in each for each in output), (
                    f"not printed:\n{line}\n" + "\n".join(output)
                )
                num_shown += 1
    assert num_run >= 8 and num_shown >= 15
    assert (tmp_path / "two.html").stat().st_size > 10_000


def test_blocks_are_told_apart():
    """The numbers of blocks are as expected; a page without commands would pass the other test."""
    kinds = [block.kind for block in blocks()]
    assert (kinds.count("sh"), kinds.count("python"), kinds.count("text")) == (11, 3, 9)
    assert sum(STOPPED.search(block.said) is not None for block in blocks()) == 1
    assert sum(NOT_RUN.search(block.said) is not None for block in blocks()) == 2


def test_numbers_are_no_difference_and_words_are():
    first = "step  50/100  loss 1.2015  190.5 samples/s  0:07 left; 3 ms"
    assert alike(first) == alike("step 7/100  loss 0.2  9 samples/s  12:07 left; 0.1 s")
    assert alike(first) != alike("step 50/100  lass 1.2015  190.5 samples/s  0:07 left; 3 ms")
    assert alike("rank 1 F0-F1..B0") == alike("rank 0 .F0F1") == "rank #"
