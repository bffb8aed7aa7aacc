"""Closing table of a run: the content of summary.json as text."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpipe_hpc.planner.report.columns import aligned
from gpipe_hpc.units import bytes_text, flops_text

_MAX_RANKS: Final = 16  # lines of a table; of more ranks only the extremes are shown
_AROUND: Final = {
    "reading_ahead_s": "reading",
    "edge_s": "all-reduce",
    "clipping_s": "clipping",
    "optimizer_s": "optimizer",
}
_CAUSES: Final = {
    "fill_and_drain_s": "fill, drain",
    "imbalance_s": "imbalance",
    "transfers_s": "transfers",
    "reduction_tail_s": "reductions",
    "other_replicas_s": "replicas",
}
# A single rank is idle only between its actions.
_ALONE: Final = {"transfers_s": "between actions"}
_OF_REPLICAS: Final = ("reduction_tail_s", "other_replicas_s")


def summary_text(summary: Mapping[str, Any]) -> str:
    """Return the closing table; unknown values are left out."""
    parts = [_heading(summary), _pace(summary), _comparison(summary)]
    parts += [_ranks(summary), _stalls(summary), _balance(summary), _advice(summary)]
    return "\n".join(filter(None, parts))


def _heading(summary: Mapping[str, Any]) -> str:
    steps = summary["last_step"] - summary["first_step"]
    text = f"{summary['outcome']} after step {summary['last_step']} of {summary['steps_asked']}"
    return f"{text}, {steps} of them in this start"


def _pace(summary: Mapping[str, Any]) -> str:
    step, pace = summary["step"], summary["throughput"]
    if pace["samples_per_s"] is None:
        return ""
    words = [f"{pace['samples_per_s']:,.4g} samples/s"]
    if pace["tokens_per_s"] is not None:
        words.append(f"{pace['tokens_per_s']:,.0f} tokens/s")
    if pace["share_of_peak"] is not None:
        best = flops_text(pace["device_flops_per_s"])
        words.append(f"{pace['share_of_peak']:.1%} of the devices' peak ({best}/s each)")
    return (
        f"a step took {_time(step['step_time_s'])}, {_time(step['outside_pipeline_s'])} of it "
        f"outside the pipeline{_around(step)} (medians): {', '.join(words)}"
    )


def _around(step: Mapping[str, Any]) -> str:
    """Format the times of the parts of a step outside the pipeline."""
    known = [f"{name} {_time(step[key])}" for key, name in _AROUND.items() if key in step]
    return f" ({', '.join(known)})" if known else ""


def _advice(summary: Mapping[str, Any]) -> str:
    """Format the advice with the largest gain, and its assumptions."""
    if not summary["advice"]:
        return ""
    first = summary["advice"][0]
    text = f"advice: {first['text']}, simulated with this run's measured times"
    if first["assumes"]:
        return f"{text} and assuming {first['assumes']}"
    more = first["more_bytes"]
    change = f"{bytes_text(abs(more))} {'more' if more > 0 else 'less'}" if more else "as much"
    return f"{text}; the fullest rank needs {change} memory"


def _comparison(summary: Mapping[str, Any]) -> str:
    step, expected = summary["step"], summary["expected"]
    if step["pipeline_s"] is None:
        return ""
    text = (
        f"measured: {_time(step['pipeline_s'])} in the pipeline a step, "
        f"bubble {step['bubble']:.1%} (idle over total)"
    )
    if expected is None:
        return text
    return f"{text}; expected: {_time(expected['pipeline_s'])}, {expected['bubble']:.1%}"


def _ranks(summary: Mapping[str, Any]) -> str:
    ranks = summary["ranks"]
    shown = _shown(ranks)
    if not shown:
        return ""
    traced = summary["traced_step"]
    clock = _TimeUnit.fit(traced["pipeline_s"]) if traced else _TimeUnit("s", 1.0)
    has_times = any(each["busy_s"] is not None for each in shown)
    has_causes = any(each["idle_causes"] for each in shown)
    several = summary["layout"]["replicas"] > 1
    named = _ALONE if len(ranks) == 1 and not several else _CAUSES
    causes = [n for n in named if has_causes and (several or n not in _OF_REPLICAS)]
    columns = [*["busy", "idle"] * has_times, *(named[name] for name in causes)]
    units = [f"{head} {clock.unit}" for head in columns]
    has_plan = any(each["planned_memory"] for each in shown)
    memory = ["peak memory", "above start", *["planned"] * has_plan]
    rows = [["rank", "stages", *units, *memory]]
    for each in shown:
        times = [clock.text(each[name]) for name in ("busy_s", "idle_s")] if has_times else []
        why = each["idle_causes"] or {}
        planned = each["planned_memory"]
        peak, before = each["peak_memory_bytes"], each["memory_before_bytes"]
        rows.append(
            [
                str(each["rank"]),
                ",".join(map(str, each["stages"])) or "none",
                *times,
                *(clock.text(why.get(name)) for name in causes),
                bytes_text(peak),
                bytes_text(max(0, peak - before)),
                *[bytes_text(planned["total_bytes"]) if planned else ""] * has_plan,
            ]
        )
    return "\n".join(filter(None, [_caption(summary, len(shown)), aligned(rows), _legend(summary)]))


def _legend(summary: Mapping[str, Any]) -> str:
    """Explain the memory columns, which have different meanings."""
    parts = [
        f"peak memory: {summary['peak_memory_meaning']}",
        "above start: the increase since the start",
    ]
    if any(each["planned_memory"] for each in summary["ranks"]):
        parts.append(
            "planned: weights, gradients, optimizer, activations and workspace as counted, without "
            "memory of Python and libraries"
        )
    return "\n".join(parts)


def _caption(summary: Mapping[str, Any], num_shown: int) -> str:
    """Return the heading of the table: the traced step, and how many ranks are shown."""
    words = []
    if summary["traced_step"] is not None:
        words.append(f"step {summary['traced_step']['step']}, the median of those traced")
    num_ranks = summary["layout"]["ranks"]
    if num_shown < num_ranks:
        words.append(f"{num_shown} of {num_ranks} ranks (summary.json contains all)")
    return f"{'; '.join(words)}:" if words else ""


def _shown(ranks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the ranks to show: all, or if there are many, those with extreme times or memory."""
    if len(ranks) <= _MAX_RANKS:
        return list(ranks)
    by_time = sorted(ranks, key=lambda each: each["busy_s"] or 0.0)
    by_memory = sorted(ranks, key=lambda each: each["peak_memory_bytes"])
    few = _MAX_RANKS // 4
    ends = [*by_time[:few], *by_time[-few:], *by_memory[:few], *by_memory[-few:]]
    return [each for _, each in sorted({each["rank"]: each for each in ends}.items())]


def _stalls(summary: Mapping[str, Any]) -> str:
    seconds = sum(summary["stalls_s"].values())
    return f"checkpoints and copies delayed the run by {seconds:.3f} s in total" if seconds else ""


def _balance(summary: Mapping[str, Any]) -> str:
    """Format the weights with which replicas of unequal speed would end at the same time."""
    better = summary["balance"]
    if better is None:
        return ""
    weights, gain = ",".join(map(str, better["weights"])), 100 * better["gain"]
    return (
        f"advice: outer.weights=[{weights}]: -{gain:.0f} % of the computing time of the slowest "
        f"replica, if the time per micro-batch of each replica stays as in this run"
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


class _TimeUnit(NamedTuple):
    """The unit of all times in a table."""

    unit: str
    factor: float

    @classmethod
    def fit(cls, longest_s: float) -> "_TimeUnit":
        """Choose seconds or milliseconds by the longest time."""
        return cls("s", 1.0) if longest_s >= 1 else cls("ms", 1e3)

    def text(self, seconds: float | None) -> str:
        return (
            "" if seconds is None else f"{seconds * self.factor:.{3 if self.unit == 's' else 1}f}"
        )
