"""Find changes that would make a run faster, from the measured time of each part of a step."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpipe_hpc.report.accounting import END_STALL, Account
from gpipe_hpc.report.number_format import percent, time_text
from gpipe_hpc.report.pace import SlowPart, slow_parts, timed_layers, without
from gpipe_hpc.report.record import Record
from gpipe_hpc.schedule.table.actions import COMPUTE
from gpipe_hpc.schedule.waits import DataFlow
from gpipe_hpc.trainer.traces.files import ReadStep
from gpipe_hpc.units import bytes_text

_LEAST_GAIN: Final = 0.02  # of a step; smaller gains are within run-to-run noise
_BRACKETS: Final = re.compile(r" \(without [^)]*\)")
_KNOWN_RATIO: Final = 1.15  # smaller ratios to the slowdown used for the cut are not new


class Finding(NamedTuple):
    """A suggested change: what, why, and the seconds of a mean step that it would save.

    `settings`: command-line settings to copy; empty if no setting helps.
    """

    what: str
    why: str
    gain_s: float
    settings: str = ""


def findings_of(record: Record, account: Account) -> list[Finding]:
    """Return the changes that would save at least 2 % of a mean step, the largest gain first."""
    found = [
        *_reading(record, account),
        *_checkpoint(record, account),
        *_slow(record, account),
        *_links(record, account),
        *_weights(record, account),
        *_settings(record, account),
    ]
    least_s = _LEAST_GAIN * account.step_s
    return sorted(filter(lambda e: e.gain_s >= least_s, found), key=lambda each: -each.gain_s)


def _reading(record: Record, account: Account) -> Iterator[Finding]:
    gain_s = account.parts["reading data"]
    longest = max(
        (each for each in record.summary.get("ranks") or () if each.get("reading_s") is not None),
        key=lambda each: each["reading_s"],
        default=None,
    )
    where = ""
    if longest is not None:
        where = f" Rank {longest['rank']} waits longest, {time_text(longest['reading_s'])} a step."
    workers = record.settings.get("data.workers")
    settings = ""
    if isinstance(workers, int):
        settings = f"data.workers={max(2, 2 * workers)}"
    yield Finding(
        f"Reading data delays each step by {time_text(gain_s)}",
        f"Ranks wait for their samples before they compute.{where} Read with more processes, or "
        f"store the data in a format that is faster to read.",
        gain_s,
        settings,
    )


def _checkpoint(record: Record, account: Account) -> Iterator[Finding]:
    for name, what, every in (
        ("checkpoint_stall_s", "checkpoint", "checkpoint.every"),
        ("neighbour_stall_s", "copy in memory", "checkpoint.neighbour_every"),
    ):
        stalls = [each for each in record.stall_s(name) if each > 0]
        ends = record.stall_s(END_STALL) if name == "checkpoint_stall_s" else []
        if not stalls:
            continue
        whole_s = sum(stalls) + sum(ends)
        gain_s = whole_s / account.num_steps
        is_behind = name == "neighbour_stall_s" or record.settings.get("checkpoint.in_background")
        number = record.settings.get(every)
        rarer = f"{every}={2 * number}" if isinstance(number, int) and number else ""
        yield Finding(
            f"Each {what} delays the run by {time_text(whole_s / len(stalls))}",
            f"{len(stalls)} of them in {account.num_steps} steps: {time_text(gain_s)} a step. "
            f"Write to faster storage, less often, or in the background.",
            gain_s,
            rarer if is_behind else "checkpoint.in_background=true",
        )


def _slow(record: Record, account: Account) -> Iterator[Finding]:
    found = slow_parts(timed_layers(record))
    for slow in found:
        share = without(record, slow)
        if share is None:
            continue
        gain_s = share * account.pipeline_s
        yield (
            _slow_rank(record, slow, gain_s, _paces_words(record, found))
            if slow.layer is None
            else _slow_layer(record, slow, gain_s)
        )


def _paces_words(record: Record, found: Sequence[SlowPart]) -> str:
    """Return the setting that gives slow ranks less work.

    Empty if the partition already takes the slow ranks into account, or was given by the user.
    """
    layout = record.summary["layout"]
    size = layout["ranks"] // layout["replicas"]
    places = {each["rank"]: each["stage_rank"] for each in record.summary["ranks"]}
    paces = [1.0] * size
    for slow in found:
        if slow.layer is None:
            place = places[slow.ranks[0]]
            paces[place] = max(paces[place], slow.factor)
    known = layout.get("paces") or [1.0] * size
    told = len(known) == size and all(
        own <= _KNOWN_RATIO * its / min(known) for own, its in zip(paces, known, strict=True)
    )
    by_hand = not isinstance(record.settings.get("pipeline.partition", "time"), str)
    if size == 1 or told or by_hand:
        return ""
    return _pasteable(f"pipeline.paces=[{','.join(f'{pace:.3g}' for pace in paces)}]")


def _slow_rank(record: Record, slow: SlowPart, gain_s: float, settings: str) -> Finding:
    rank = next(e for e in record.summary["ranks"] if e["rank"] == slow.ranks[0])
    more = " If it remains slow, give it less work; this saves less time." if settings else ""
    return Finding(
        f"Rank {rank['rank']} on {rank['host']} is slow: {slow.factor:.2f} times its share",
        "All its layers take longer than layers of the same kind elsewhere. The gain is the time "
        "saved if the rank were as fast as the others. Check what else runs on the host, its "
        f"number of threads, and its clock frequency.{more}",
        gain_s,
        settings,
    )


def _slow_layer(record: Record, slow: SlowPart, gain_s: float) -> Finding:
    told = [
        each["kind"]
        for index, each in enumerate(record.summary.get("layers") or ())
        if index == slow.layer
    ]
    kind = f" ({told[0]})" if told else ""
    ranks = ", ".join(map(str, slow.ranks))
    return Finding(
        f"Layer {slow.layer}{kind} is slow: {slow.factor:.2f} times the time of similar layers",
        f"On rank {ranks} its forward takes {time_text(slow.forward_s)} a micro-batch longer than "
        f"layers with as many FLOPs and parameters. The gain is the time saved if it were as fast "
        f"as they are. Profile its forward.",
        gain_s,
    )


def _links(record: Record, account: Account) -> Iterator[Finding]:
    in_pipeline_s, sync_s = account.parts["transfers"], account.parts["synchronization"]
    gain_s = in_pipeline_s + sync_s
    if record.traced is None:
        return
    waits = link_waits(record.traced)
    if not waits:
        return
    (source, destination), (seconds, number) = max(waits.items(), key=lambda each: each[1][0])
    hosts = {each["rank"]: each["host"] for each in record.summary.get("ranks") or ()}
    ends = f"{source} to {destination}"
    if len({hosts.get(source), hosts.get(destination)} - {None}) > 1:
        ends += f" ({hosts.get(source)} to {hosts.get(destination)})"
    often = "Once" if number == 1 else f"{number} times"
    yield Finding(
        f"Waiting for transfers takes {time_text(in_pipeline_s)} of each step, most from rank "
        f"{ends}, and synchronization after the pipeline {time_text(sync_s)}",
        f"{often} in the traced step rank {destination} was idle although its input had been "
        f"computed, {time_text(seconds / number)} each. The gain is at most the sum of both "
        f"times. Causes are a slow link, or more processes than CPU cores.",
        gain_s,
    )


def link_waits(traced: ReadStep) -> Mapping[tuple[int, int], tuple[float, int]]:
    """Return the seconds and number of waits for transfers, by (source rank, destination rank).

    A wait lasts from the moment at which the receiver is idle and the value is computed, until the
    receiver continues.
    """
    found: dict[tuple[int, int], tuple[float, int]] = {}
    first = 0
    for timeline in traced.replicas:
        flow = DataFlow(timeline)
        for row in timeline.events:
            free_s = timeline.start_s
            for event in row:
                if event.action.op not in COMPUTE:
                    continue
                wait = flow.waited_for(event)
                if wait is not None and wait.maker.rank != event.rank:
                    waited_s = event.start_s - max(free_s, wait.maker.end_s)
                    if wait.maker.end_s > free_s and waited_s > 0:
                        key = first + wait.maker.rank, first + event.rank
                        seconds, number = found.get(key, (0.0, 0))
                        found[key] = seconds + waited_s, number + 1
                free_s = event.end_s
        first += timeline.num_ranks
    return found


def _weights(record: Record, account: Account) -> Iterator[Finding]:
    better = record.summary.get("balance")
    if better and not record.is_overtaken:
        weights = ",".join(map(str, better["weights"]))
        yield Finding(
            "Replicas differ in speed",
            "With these weights replicas would finish at the same time, if each micro-batch takes "
            "as long as in this run.",
            better["gain"] * account.pipeline_s,
            _pasteable(f"outer.weights=[{weights}]"),
        )


def _settings(record: Record, account: Account) -> Iterator[Finding]:
    for each in record.summary.get("advice") or () if not record.is_overtaken else ():
        yield Finding(
            f"Another layout: {each['settings']}",
            _advice_text(each),
            each["gain"] * account.pipeline_s,
            _pasteable(each["settings"]),
        )


def _pasteable(settings: str) -> str:
    """Quote settings for any shell; remarks in brackets, written by older runs, are removed."""
    words = _BRACKETS.sub("", settings).split()
    return " ".join(f"'{word}'" if "[" in word else word for word in words)


def _advice_text(each: Mapping[str, Any]) -> str:
    text = (
        f"Simulated with the measured times of this run: {percent(each['gain'])} less time in the "
        f"pipeline"
    )
    if each.get("without"):
        text += f"; remove {', '.join(each['without'])}"
    if each["assumes"]:
        return f"{text}, assuming {each['assumes']}."
    more = each["more_bytes"]
    if not more:
        return f"{text}; the fullest rank needs the same memory."
    return (
        f"{text}; the fullest rank needs {bytes_text(abs(more))} {'more' if more > 0 else 'less'} "
        f"memory."
    )
