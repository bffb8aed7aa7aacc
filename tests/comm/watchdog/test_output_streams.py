"""What is told to users goes out in one piece."""

import io
import os
import sys
from pathlib import Path

import gpipe_hpc
from gpipe_hpc.comm.watchdog.output_streams import print_line


def test_a_text_of_several_lines_is_one_write(monkeypatch):
    """Its end was a write of its own, and came behind another rank's text."""
    # A pipe of packets: each read returns what one write has brought.
    reads, writes = os.pipe2(os.O_DIRECT)
    with open(reads, "rb", buffering=0) as received, open(writes, "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "__stderr__", stream)
        print_line("one\ntwo ä")
        print_line("three")
        assert received.read(100) == b"one\ntwo \\xe4\n"
        assert received.read(100) == b"three\n"


def test_whoever_collects_standard_error_gets_it(monkeypatch):
    collected = io.StringIO()
    monkeypatch.setattr(sys, "stderr", collected)
    print_line("one")
    assert collected.getvalue() == "one\n"


def test_nobody_prints_to_standard_error_by_another_way():
    folder = Path(gpipe_hpc.__file__).parent
    sources = {path: path.read_text("utf-8") for path in folder.rglob("*.py")}
    assert [path for path, text in sources.items() if "file=sys.stderr" in text] == []
