"""The closing table: what is known, and no more; of many ranks those at the ends."""

from gpipe_hpc.trainer.summary.table import summary_text


def rank(number, busy_s=None, peak=100, idle_causes=None, planned=None):
    return {
        "rank": number,
        "stages": [number],
        "busy_s": busy_s,
        "idle_s": None if busy_s is None else 2.0 - busy_s,
        "idle_causes": idle_causes,
        "peak_memory_bytes": peak * 10**6,
        "memory_before_bytes": 60 * 10**6,
        "planned_memory": planned,
    }


def summary(ranks, **more):
    return {
        "outcome": "done",
        "first_step": 3,
        "last_step": 9,
        "steps_asked": 9,
        "layout": {"ranks": len(ranks), "replicas": 1},
        "throughput": dict.fromkeys(
            ("samples_per_s", "tokens_per_s", "device_flops_per_s", "share_of_peak")
        ),
        "step": dict.fromkeys(("step_time_s", "pipeline_s", "outside_pipeline_s", "bubble")),
        "expected": None,
        "stalls_s": {},
        "balance": None,
        "traced_step": None,
        "ranks": ranks,
        "advice": [],
        "peak_memory_meaning": "of the process",
    } | more


def test_of_a_run_that_knows_little_the_little_is_said():
    assert summary_text(summary([rank(0)])).splitlines() == [
        "done after step 9 of 9, 6 of them in this start",
        "rank  stages  peak memory  above start",
        "   0       0       100 MB      40.0 MB",
        "peak memory: of the process",
        "above start: the increase since the start",
    ]


def test_all_that_is_known_is_said():
    causes = {
        "fill_and_drain_s": 0.25,
        "imbalance_s": 0.125,
        "transfers_s": 0.125,
        "other_replicas_s": 0.5,
    }
    own = rank(0, 1.0, idle_causes=causes, planned={"total_bytes": 10**9})
    pace = {
        "samples_per_s": 10.0,
        "tokens_per_s": 12345.0,
        "device_flops_per_s": 989e12,
        "share_of_peak": 0.4321,
    }
    step = {"step_time_s": 2.5, "pipeline_s": 2.0, "outside_pipeline_s": 0.5, "bubble": 0.25}
    text = summary_text(
        summary(
            [own],
            layout={"ranks": 1, "replicas": 2},
            throughput=pace,
            step=step,
            expected={"pipeline_s": 1.5, "bubble": 0.125},
            stalls_s={"a": 1.0, "b": 2.0},
            traced_step={"step": 7, "pipeline_s": 2.0},
            advice=[
                {"text": "x=1: -7 % of it", "more_bytes": -(10**6), "assumes": ""},
                {"text": "y=2", "more_bytes": 0, "assumes": ""},
            ],
        )
    )
    assert "10 samples/s, 12,345 tokens/s, 43.2% of the devices' peak (989 TFLOP/s each)" in text
    assert (
        "2.000 s in the pipeline a step, bubble 25.0% (idle over total); expected: 1.500 s" in text
    )
    assert "step 7, the median of those traced:" in text
    line = next(line for line in text.splitlines() if line.strip().startswith("0 "))
    assert line.split() == [
        *("0", "0", "1.000", "1.000", "0.250", "0.125", "0.125", "0.500"),
        *("100", "MB", "40.0", "MB", "1.00", "GB"),
    ]
    assert "delayed the run by 3.000 s" in text
    # The columns were 128 MB and 15 MB for one rank, and nothing said why.
    assert "planned: weights, gradients, optimizer, activations and workspace as counted" in text
    assert text.splitlines()[-1].startswith("advice: x=1: -7 % of it, simulated")
    assert text.endswith("the fullest rank needs 1.00 MB less memory")


def test_one_rank_alone_waits_for_nobody():
    """On a GPU 60 ms of a step were said to be for transfers, and there was one rank."""
    causes = dict.fromkeys(("fill_and_drain_s", "imbalance_s", "other_replicas_s"), 0.0)
    own = rank(0, 1.0, idle_causes=causes | {"transfers_s": 0.125})
    traced = {"step": 7, "pipeline_s": 2.0}
    text = summary_text(summary([own], layout={"ranks": 1, "replicas": 1}, traced_step=traced))
    head = next(line for line in text.splitlines() if line.startswith("rank"))
    assert "between actions s" in head
    assert not any(word in head for word in ("transfers", "fill", "imbalance", "replicas"))


def test_of_a_thousand_ranks_those_at_the_ends_are_shown():
    ranks = [rank(number, busy_s=1 + (number % 7) / 10, peak=100 + number) for number in range(999)]
    lines = summary_text(summary(ranks)).splitlines()
    assert len(lines) < 21 and "of 999 ranks" in lines[1]
    shown = [int(line.split()[0]) for line in lines[3:-2]]
    assert shown == sorted(shown) and {0, 998} <= set(shown)


def test_what_would_balance_replicas_is_said():
    better = {"weights": [3, 1], "gain": 0.25}
    (line,) = [x for x in summary_text(summary([], balance=better)).splitlines() if "advice" in x]
    assert "outer.weights=[3,1]: -25 % of the computing time of the slowest replica" in line


def test_the_time_around_the_pipeline_is_said():
    step = {"step_time_s": 2.5, "pipeline_s": 2.0, "outside_pipeline_s": 0.5, "bubble": 0.25}
    around = {"reading_ahead_s": 0.1, "edge_s": 0.02, "clipping_s": 0.003, "optimizer_s": 0.3}
    pace = dict.fromkeys(("tokens_per_s", "share_of_peak", "device_flops_per_s"))
    text = summary_text(summary([], step=step | around, throughput=pace | {"samples_per_s": 10.0}))
    assert (
        "a step took 2.500 s, 0.500 s of it outside the pipeline (reading 0.100 s, all-reduce "
        "20 ms, clipping 3 ms, optimizer 0.300 s) (medians)"
    ) in text
