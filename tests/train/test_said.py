"""What a run says of itself: at its start, and where there is nothing to do."""

import json
import os
import re
import subprocess
import sys

import pytest

from gpipe_hpc.config import check_config, compose_config
from tests.support import train_here


def said(folder, ranks, *words):
    """Return the log of the first rank of a run."""
    train_here(ranks, f"run.dir={folder}", *words)
    return (folder / "logs" / "rank0.log").read_text()


def test_that_layers_are_timed_is_said_before_and_after(tiny, tmp_path):
    """Nothing was said for as long as that took, which may be minutes."""
    text = said(tmp_path, 1, *tiny, "train.steps=1", "pipeline.partition=time")
    begun = re.search(r"timing (\d+) layers on one micro-batch \.\.\.", text)
    done = re.search(r"timed the layers in [\d.]+ s", text)
    assert begun and done and begun.start() < done.start() < text.index("stages:")
    assert int(begun[1]) > 1


def test_that_an_order_is_searched_is_said(tiny, tmp_path):
    auto = ("pipeline.schedule=auto", "+pipeline.options.trials=2")
    text = said(tmp_path, 2, *tiny, "train.steps=1", *auto)
    assert text.index("searching for a schedule") < text.index("stages:")


@pytest.mark.parametrize("kind", ["text", "python_source", "jsonl", "synthetic"])
def test_the_data_are_told_whatever_their_kind(tiny, tmp_path, kind):
    """Arrays and images were named with their samples, tokens and text were not."""
    (tmp_path / "a.txt").write_text("words " * 2000)
    (tmp_path / "a.py").write_text("words " * 2000)
    (tmp_path / "a.jsonl").write_text('{"text": "%s"}\n' % ("words " * 200) * 60)
    own = {
        "text": [f"data.paths=[{tmp_path}/a.txt]"],
        "python_source": [f"data.root={tmp_path}", "data.validation_percent=0"],
        "jsonl": [f"data.paths=[{tmp_path}/a.jsonl]"],
        "synthetic": [],
    }[kind]
    model = [word for word in tiny if not word.startswith("data")]
    text = said(
        tmp_path / "run", 1, *model, f"data={kind}", "data.seq_len=16", *own, "train.steps=1"
    )
    line = re.search(r"data: (.*)", text)[1]
    assert re.search(r"[\d,]+ .*training.*, [\d,]+ .*validation", line), line
    if kind != "synthetic":
        assert str(tmp_path) in line and "tokens" in line


def test_a_run_that_needs_more_than_it_may_use_is_warned_once(tiny, tmp_path):
    """`plan` refused the same settings; the run said nothing of pipeline.memory_bytes."""
    text = said(tmp_path, 2, *tiny, "train.steps=2", "pipeline.memory_bytes=20kB")
    (warning,) = (line for line in text.splitlines() if "pipeline.memory_bytes allows" in line)
    assert "WARNING" in warning and "allows 20.0 kB" in warning
    assert re.search(r"ranks 0-1|ranks 0, 1", warning) and "the run continues" in warning
    ample = said(tmp_path / "ample", 2, *tiny, "train.steps=1", "pipeline.memory_bytes=1GB")
    assert "pipeline.memory_bytes allows" not in ample


@pytest.mark.parametrize("recompute", ["never", "budget"])
def test_a_searched_order_keeps_within_the_memory_of_a_run(tiny, tmp_path, recompute):
    """`auto` ran the order that keeps most, whatever pipeline.memory_bytes said."""
    auto = ("pipeline.schedule=auto", "+pipeline.options.trials=2", "train.steps=1")
    size = (*tiny, *auto, "train.batch_size=64", "pipeline.microbatches=8")
    said(tmp_path / "free", 2, *size, "pipeline.recompute=never")
    free = [rank["planned_memory"] for rank in summary(tmp_path / "free")["ranks"]]
    fullest = max(free, key=lambda planned: planned["total_bytes"])
    limit = fullest["total_bytes"] - 0.4 * fullest["activation_bytes"]
    own = (f"pipeline.recompute={recompute}", f"pipeline.memory_bytes={limit:.0f}")
    text = said(tmp_path / "bound", 2, *size, *own)
    held = [rank["planned_memory"] for rank in summary(tmp_path / "bound")["ranks"]]
    assert all(planned["total_bytes"] <= limit for planned in held)
    assert "pipeline.memory_bytes allows" not in text


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_empty_micro_batches_are_expected_to_take_no_time(tiny, tmp_path):
    """A run of 4 samples in 8 micro-batches was expected to take as long as one of 8."""
    size = ("train.steps=1", "train.batch_size=4", "pipeline.partition=time")
    text = said(tmp_path, 2, *tiny, *size, "pipeline.microbatches=8")
    expected = float(re.search(r"expected from the measured layers: ([\d.]+) s", text)[1])
    assert expected >= 0
    planned = (tmp_path / "trace" / "planned.json").read_text()
    spans = re.findall(r'\["0F(\d)", ([\d.e-]+), ([\d.e-]+)\]', planned)
    took = {int(number): float(end) - float(begin) for number, begin, end in spans}
    assert all(took[number] > 0 for number in range(4))
    assert all(took[number] == 0 for number in range(4, 8))


def test_that_nothing_was_trained_is_said_last(tiny, tmp_path):
    """It stood above tables and lines that looked as if the run had begun."""
    words = (*tiny, "train.steps=1")
    said(tmp_path, 1, *words)
    *_, last = said(tmp_path, 1, *words).splitlines()
    assert "nothing to train: the run has already done 1 steps" in last


def test_a_vocabulary_that_the_data_do_not_use_is_told():
    """gpt2 has 50,257 tokens, bytes are 256: the rest was trained in silence."""
    words = ["model=gpt2", "data.seq_len=64"]
    (doubt,) = check_config(compose_config(words), 1)
    assert "model.vocab_size=50257 is far more than the 256 tokens" in doubt
    assert "set model.vocab_size=256" in doubt
    assert check_config(compose_config([*words, "model.vocab_size=512"]), 1) == []


LOST_STORE = """
import datetime, subprocess, sys, types
from gpipe_hpc import train

SERVE = '''
import torch.distributed as dist, time
store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(1)
'''

def lose(stop):
    import torch.distributed as dist

    server = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    port = int(server.stdout.readline())
    store = dist.TCPStore("127.0.0.1", port, 2, False, timeout=datetime.timedelta(seconds=9))
    try:
        store.get("never set")
    except dist.DistError:
        print("lost")

# In its place, as importing the real one would import torch before the level is chosen.
command = sys.modules["gpipe_hpc.trainer.command"] = types.ModuleType("command")
command.run_command = lose
train.main()
"""


@pytest.mark.parametrize("level", [None, "WARNING"])
def test_a_lost_store_prints_no_stack_of_cpp_unless_asked(level):
    """Twenty frames of libtorch came before the message that says which rank has ended."""
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_CPP_LOG_LEVEL"}
    if level:
        environment["TORCH_CPP_LOG_LEVEL"] = level
    command = [sys.executable, "-c", LOST_STORE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "lost" in done.stdout, done.stderr
    assert ("frame #" in done.stderr) == (level is not None)
