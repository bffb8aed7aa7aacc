"""Ranks that fall silent, hang or only seem to: named in seconds, and all end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import has_begun, product
from tests.train.mine import MINE

pytestmark = pytest.mark.slow


def named(ranks, numbers, *parts):
    """Say whether each of these ranks has said all of the parts."""
    return all(part in ranks.commands[n].output for n in numbers for part in parts)


def watchers(ranks):
    """Return the process numbers of the helpers of all ranks."""
    own = {str(command.pid) for command in ranks.commands}
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if any("gpipe_hpc.comm.watchdog" in word for word in words) and words[-2] in own:
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize(("victim", "is_continued"), [product(0, False), (2, True)])
def test_a_stopped_rank_is_named_in_10_s_and_all_end_in_30(
    start_ranks, tiny, tmp_path, until, victim, is_continued
):
    """It went unnoticed for all of comm.timeout_s: 606 s of silence."""
    ranks = start_ranks(4, *tiny, "train.steps=100000", "run.dir=run")
    until(lambda: has_begun(tmp_path / "run"), 60, "it trains")
    others = [rank for rank in range(4) if rank != victim]
    stopped, since_s = ranks.commands[victim], time.monotonic()
    stopped.signal(signal.SIGSTOP)
    warning = f"rank {victim} on "
    until(lambda: named(ranks, others, warning, "stopped", "blocked"), 10, "it is named")
    for rank in others:
        assert ranks.commands[rank].wait(40).code == 1
        # A rank that waits in a collective is ended by force if that cannot be broken.
        words = ranks.outputs[rank]
        told = words.partition("PeerError")[2] or words.partition("the process ends now")[2]
        assert f"rank {victim} on " in told, words
        assert "SIGSTOP" in told and "last action" in told
    assert stopped.code is None
    if is_continued:
        stopped.signal(signal.SIGCONT)
        assert stopped.wait(30).code == 1, "it must not go on alone"
    else:
        assert stopped.wait(30).code == -signal.SIGKILL, "its launcher would wait for it"
    print(f"all ended after {time.monotonic() - since_s:.1f} s")
    until(lambda: not watchers(ranks), 10, "its watcher has ended")


def test_a_dead_rank_is_named_while_a_process_lives_that_it_forked(
    start_ranks, mine, tmp_path, until
):
    """The child held its connections open: nobody noticed before comm.timeout_s."""
    fault = ("model.kind=orphan", "model.stage=1", "model.seconds=60")
    ranks = start_ranks(3, *MINE, *fault, "pipeline.partition=[1,1,2]", env=mine)
    until((tmp_path / "child").exists, 60, "it has forked")
    child = int((tmp_path / "child").read_text() or 0)
    try:
        for rank in (0, 2):
            assert ranks.commands[rank].wait(20).code == 1
            assert "rank 1" in ranks.outputs[rank] and "SIGKILL" in ranks.outputs[rank]
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("kind", [product("sleep"), "regex"])
def test_a_stuck_layer_is_named_with_action_and_stack_and_all_end(start_ranks, mine, until, kind):
    """The others' reports named nobody, and the stuck process itself lived on for ever."""
    fault = (f"model.kind={kind}", "model.stage=2", "comm.stall_s=3", "comm.timeout_s=20")
    ranks = start_ranks(3, *MINE, *fault, "pipeline.partition=[1,1,2]", env=mine)
    everybody = range(3) if kind == "sleep" else range(2)
    parts = ("rank 2 on ", "no progress", "2F2 in step 1", "mine.py", "in forward")
    until(lambda: named(ranks, everybody, *parts), 60, "it is named")
    assert all("rank 0 on" not in output for output in ranks.outputs), "it only waits"
    ranks.wait(60)
    assert ranks.codes[:2] == [1, 1]
    assert ranks.codes[2] == (1 if kind == "sleep" else -signal.SIGKILL)
    assert all("PeerError" in output and "rank 2" in output for output in ranks.outputs[:2])
    assert "did not end within" in ranks.outputs[2], "it says why it ends"


def test_a_long_call_that_keeps_the_interpreter_is_no_silence(start_ranks, mine):
    """A beat from a thread would stop as long."""
    fault = ("model.kind=lock", "model.seconds=12", "comm.silence_s=4")
    ranks = start_ranks(2, *MINE, *fault, env=mine).wait(90)
    assert ranks.codes == [0, 0], ranks.outputs
    assert all("gpipe_hpc.watch" not in output for output in ranks.outputs), ranks.outputs


def test_a_job_that_is_suspended_as_a_whole_goes_on(start_ranks, tiny, tmp_path, until):
    """Schedulers do that, to let another job run."""
    ranks = start_ranks(2, *tiny, "train.steps=100000", "run.dir=run", "comm.silence_s=4")
    until(lambda: has_begun(tmp_path / "run"), 60, "it trains")
    processes = [command.pid for command in ranks.commands] + watchers(ranks)
    assert len(processes) == 4
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(8.0)
    for pid in reversed(processes):
        os.kill(pid, signal.SIGCONT)
    time.sleep(8.0)
    assert ranks.codes == [None, None], ranks.outputs
    ranks.commands[0].signal(signal.SIGTERM)
    ranks.wait(60)
    assert ranks.codes == [75, 75], ranks.outputs


@pytest.mark.long
@pytest.mark.timeout(500)
def test_hundreds_of_steps_on_a_busy_machine_raise_no_alarm(start_ranks, tiny):
    """Each core is wanted by several others all the time."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        ranks = start_ranks(4, *tiny, "train.steps=250", "run.dir=run").wait(400)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert ranks.codes == [0] * 4, ranks.outputs
    assert all("gpipe_hpc.watch" not in output for output in ranks.outputs), ranks.outputs
