"""torchrun --nnodes 1:2: a host is lost and comes back, and the run is what it would have been."""

import json
import os
import signal

import pytest
from torch.distributed import TCPStore

from tests.support import PAUSING_MODEL, has_begun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# torch 2.13's agents cannot take in a new host while they share the store of their rendezvous.
ENVIRON = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
FLAGS = ("--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", "--monitor-interval=0.2")
QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,is_host=0"


def lines(run):
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [line for line in map(json.loads, text.splitlines()) if "loss" in line]


def newest(run):
    return max((line["step"] for line in lines(run)), default=0)


def test_a_host_is_lost_and_comes_back(torchrun, train, tiny, tmp_path, until, free_port, same_end):
    """With fewer ranks it waited for the dead; with more torchrun's counts kept ranks apart."""
    (tmp_path / "slow.py").write_text(PAUSING_MODEL)
    (tmp_path / "memory").mkdir()
    settings = (
        *tiny,
        "model._target_=slow.build",
        "pipeline.partition=uniform",
        "train.steps=9999",
    )
    kept = ("checkpoint.every=5", "checkpoint.neighbour_every=2", "checkpoint.neighbour_dir=memory")
    port, run = free_port(), tmp_path / "run"
    places = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    env = ENVIRON | {"PYTHONPATH": os.pathsep.join(places)}
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    place = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job")
    flags = [*FLAGS, *place, f"--rdzv-conf={QUICK}", "--local-addr=127.0.0.1"]

    def host():
        return torchrun(flags, *settings, *kept, "model.pause_s=0.05", "run.dir=run", env=env)

    hosts = [host(), host()]
    until(lambda: has_begun(run, 8), 90, "both train")
    lost, left = hosts
    for pid in lost.processes():
        os.kill(pid, signal.SIGKILL)
    until(
        lambda: "2 ranks before, 1 now: 1 stage on 1 rank; resuming at step" in left.output,
        90,
        "one",
    )
    assert "has another layout" in left.output
    assert f"resumed from {run}/checkpoints/step_" in left.output
    reached = newest(run)
    until(lambda: newest(run) > reached + 3, 60, "one trains")
    back = host()

    def told():
        return left.output + back.output

    until(
        lambda: "1 rank before, 2 now: 2 stages on 2 ranks; resuming at step" in told(), 90, "two"
    )
    assert "stopped by SIGTERM after step" in told()
    reached = newest(run)
    until(lambda: newest(run) > reached + 3, 60, "both train again")
    for each in (left, back):
        each.send(signal.SIGTERM)
    for each in (left, back):
        each.wait()
    del store
    done = int((run / "REQUEUE").read_text())
    end = f"train.stop_at={done}"
    train(1, *settings, end, "run.dir=whole", env=env)
    same_end(tmp_path / "whole", run)
    own, whole = ({e["step"]: e for e in lines(tmp_path / name)} for name in ("run", "whole"))
    for step in range(1, done + 1):
        assert own[step]["position"] == whole[step]["position"] == 8 * step
