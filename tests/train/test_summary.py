"""summary.json, traces and the closing table: what a run leaves, however it ends."""

import json
import re
import signal

import pytest

from gpipe_hpc.trainer.traces.files import read_replicas, typical_trace

SLOW = pytest.mark.slow


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def keys_of(value):
    """Yield every key of a nest."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from keys_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from keys_of(each)


def check_ranks(summary, run):
    """Every rank's idle time is explained, and the bubble is that of the step's line and trace."""
    traced = summary["traced_step"]
    (line,) = (each for each in lines(run) if each["step"] == traced["step"] and "loss" in each)
    assert line["pipeline_s"] == traced["pipeline_s"]
    idle_s = sum(rank["idle_s"] for rank in summary["ranks"])
    total_s = len(summary["ranks"]) * traced["pipeline_s"]
    assert idle_s / total_s == pytest.approx(line["bubble"], abs=1e-9)
    for rank in summary["ranks"]:
        assert sum(rank["idle_causes"].values()) == pytest.approx(rank["idle_s"], abs=1e-9)
        assert min(rank["idle_causes"].values()) > -1e-6
        assert rank["peak_memory_bytes"] > rank["memory_before_bytes"] > 2**20
    path = run / traced["file"]
    assert path == typical_trace(run)
    replicas = read_replicas(path)
    assert sum(len(each.events) for each in replicas) == len(summary["ranks"])
    return line, replicas


def test_one_rank_says_what_it_did(train, tiny, tmp_path, repository):
    output = train(1, *tiny, "train.steps=5", "run.dir=run", "pipeline.partition=time")
    run = tmp_path / "run"
    summary = summary_of(run)
    assert (summary["outcome"], summary["first_step"], summary["last_step"]) == ("done", 0, 5)
    line, (timeline,) = check_ranks(summary, run)
    assert line["bubble"] == pytest.approx(timeline.bubble, abs=1e-9)
    assert summary["throughput"]["tokens_per_s"] == 16 * summary["throughput"]["samples_per_s"]
    assert summary["loss"]["last"] == lines(run)[4]["loss"] and summary["loss"]["validation"]
    assert summary["expected"]["bubble"] == pytest.approx(0, abs=1e-9)
    assert (run / "trace" / "planned.json").exists()
    assert "done after step 5 of 5" in output and "peak memory" in output
    (rank,) = summary["ranks"]
    assert 0 < rank["computed_s"] < sum(each["pipeline_s"] for each in lines(run)[1:5])
    planned = rank["planned_memory"]
    parts = [nbytes for name, nbytes in planned.items() if name != "total_bytes"]
    assert sum(parts) == planned["total_bytes"]
    num_parameters = 256 * 16 + 16 * 16 + 12 * 16 * 16 + 13 * 16 + 2 * 16 + 16 * 256
    assert planned["weight_bytes"] == pytest.approx(4 * num_parameters, rel=0.1)
    pages = [repository / "docs" / "reference" / name for name in ("metrics.md", "summary.md")]
    text = "".join(page.read_text() for page in pages)
    documented = set(re.findall(r"`([a-z_]+)`", text))
    assert set(keys_of(summary)) <= documented
    assert {key for each in lines(run) for key in each} <= documented


@pytest.mark.slow
def test_what_is_drawn_is_what_metrics_and_summary_say(train, start, tiny, tmp_path):
    """metrics.jsonl said 10.2 % where `draw` said 14.1 %."""
    train(2, *tiny, "train.steps=6", "trace.steps=4", "trace.from_step=2", "run.dir=run")
    run = tmp_path / "run"
    line, _ = check_ranks(summary_of(run), run)
    assert 2 <= line["step"] <= 5
    drawn = start("run.dir=run", module="gpipe_hpc.draw").wait()
    assert drawn.code == 0, drawn.output
    bubbles = re.findall(r"bubble ([\d.]+)%", drawn.output)
    assert float(bubbles[0]) == pytest.approx(100 * line["bubble"], abs=0.051)
    taken = sorted(each["pipeline_s"] for each in lines(run)[1:5])
    assert line["pipeline_s"] == taken[1]  # of four the faster in the middle


@pytest.mark.slow
def test_the_share_of_a_devices_peak_is_that_of_counted_flops(train, start, tiny, tmp_path):
    """Recomputation does not count: it is no gain for anybody."""
    settings = (*tiny, "pipeline.recompute=always")
    train(2, *settings, "train.steps=3", "train.device_flops_per_s=1e9", "run.dir=run")
    summary = summary_of(tmp_path / "run")
    pace = summary["throughput"]
    never = ("pipeline.stages=2", "pipeline.recompute=never")
    plan = start(*settings, *never, module="gpipe_hpc.plan").wait()
    flops = float(re.search(r"ranks: ([\d.]+) MFLOP a step", plan.output)[1]) * 1e6
    expected = flops * pace["samples_per_s"] / 8 / (2 * 1e9)
    assert pace["share_of_peak"] == pytest.approx(expected, rel=0.01)
    (again,) = (a for a in summary["advice"] if a["settings"] == "pipeline.recompute=never")
    assert again["gain"] > 0 and again["more_bytes"] > 0


MODEL = """
import torch
from torch import nn
from gpipe_hpc import LayerSpec

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        return self.linear(x) * (1.0 if float(x.sum()) > 0 else 1.0)  # no value on the meta device

def build():
    return [LayerSpec(nn.Linear, 64, 64), LayerSpec(Counts)]
"""


@pytest.mark.slow
def test_a_model_that_cannot_be_counted_is_trained_without_a_plan(train, tmp_path, environ):
    (tmp_path / "uncountable.py").write_text(MODEL)
    settings = ("model=own", "model._target_=uncountable.build", "data=synthetic_vectors")
    more = ("pipeline.partition=uniform", "train.steps=3", "run.dir=run", "train.validate_every=0")
    path = {"PYTHONPATH": f"{tmp_path}:{environ.get('PYTHONPATH', '')}"}
    output = train(1, *settings, *more, env=path)
    assert "memory was not planned" in output and "Traceback" not in output
    summary = summary_of(tmp_path / "run")
    assert summary["ranks"][0]["planned_memory"] is None and summary["advice"] == []
    assert summary["ranks"][0]["idle_causes"] and summary["throughput"]["tokens_per_s"] is None


@SLOW
def test_all_traces_are_kept_where_that_is_asked(train, tiny, tmp_path):
    train(2, *tiny, "train.steps=5", "trace.steps=3", "trace.keep=all", "run.dir=run")
    names = sorted(path.name for path in (tmp_path / "run" / "trace").glob("step_*"))
    assert names == [f"step_0000000{step}.json" for step in (3, 4, 5)]


@SLOW
def test_replicas_that_are_stopped_and_resumed(start_ranks, train, tiny, tmp_path, until):
    run = tmp_path / "run"
    layout = ("pipeline.stages=2", "pipeline.replicas=2", "run.dir=run")
    ranks = start_ranks(4, *tiny, "train.steps=5000", *layout)
    until(lambda: (run / "metrics.jsonl").exists() and len(lines(run)) > 4, 60, "it trains")
    ranks.commands[2].signal(signal.SIGTERM)
    assert ranks.wait(60).codes == [75] * 4, ranks.outputs
    summary = summary_of(run)
    done = summary["last_step"]
    assert summary["outcome"] == "stopped" and len(summary["ranks"]) == 4
    check_ranks(summary, run)
    assert "stopped after step" in ranks.outputs[0] and "replicas" in ranks.outputs[0]
    train(1, *tiny, "train.steps=5000", f"train.stop_at={done + 3}", "run.dir=run")
    summary = summary_of(run)
    assert (summary["outcome"], summary["first_step"]) == ("done", done)
    assert len(summary["ranks"]) == 1
    check_ranks(summary, run)


def test_a_run_that_fails_says_so_and_why(start_ranks, tiny, tmp_path):
    """What fails is what is told, by the message and the exit code; the summary adds to it."""
    settings = ("optimizer.lr=1e30", "train.steps=9", "run.dir=run", "lr.warmup_steps=3")
    ranks = start_ranks(2, *tiny, *settings).wait(60)
    assert ranks.codes == [4, 4], ranks.outputs
    assert "not finite" in ranks.outputs[0]
    summary = summary_of(tmp_path / "run")
    assert summary["outcome"] == "failed"
    assert summary["error"].startswith("NonFiniteError: step ")
    assert [rank["rank"] for rank in summary["ranks"]] == [0]
    assert summary["ranks"][0]["peak_memory_bytes"] > 0


@pytest.mark.slow
def test_a_report_that_fails_changes_no_failure(start, tiny, tmp_path):
    """summary.json cannot be written, as a folder stands there: the run's own error is told."""
    (tmp_path / "run" / "summary.json").mkdir(parents=True)
    failed = start(*tiny, "optimizer.lr=1e30", "train.steps=9", "run.dir=run").wait(60)
    assert failed.code == 4 and "not finite" in failed.output, failed.output
    assert "summary.json" not in failed.output


def test_a_report_that_cannot_be_written_ends_no_run(train, tiny, tmp_path):
    (tmp_path / "run" / "summary.json").mkdir(parents=True)
    output = train(1, *tiny, "train.steps=4", "train.validate_every=2", "run.dir=run")
    assert output.count("summary: cannot be written to the run folder") == 3
    assert "Traceback" not in output and "done after step 4 of 4" in output


@pytest.mark.slow
def test_a_start_that_trains_nothing_leaves_the_summary_as_it_is(train, tiny, tmp_path):
    train(1, *tiny, "train.steps=2", "run.dir=run")
    before = (tmp_path / "run" / "summary.json").read_bytes()
    train(1, *tiny, "train.steps=2", "run.dir=run")
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


@SLOW
def test_between_validations_a_look_at_a_run_shows_how_it_stands(start, tiny, tmp_path, until):
    run = tmp_path / "run"
    watched = start(*tiny, "train.steps=100000", "train.validate_every=5", "run.dir=run")
    until(lambda: (run / "summary.json").exists(), 60, "it has validated")
    summary = summary_of(run)
    assert summary["outcome"] == "running" and summary["last_step"] % 5 == 0
    watched.signal(signal.SIGKILL)
    watched.wait()
    assert summary_of(run)["outcome"] == "running"
