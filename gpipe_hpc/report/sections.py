"""Build the report of one or several runs, section by section."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gpipe_hpc.report.accounting import PARTS, Account, account_of
from gpipe_hpc.report.blocks import (
    Bar,
    Bars,
    Block,
    Curve,
    Grid,
    KeyFigures,
    Paragraph,
    Picture,
    ReportDocument,
    ReportSection,
    Suggestions,
)
from gpipe_hpc.report.findings import Finding, findings_of
from gpipe_hpc.report.number_format import number, percent, time_text
from gpipe_hpc.report.pace import timed_layers
from gpipe_hpc.report.record import Record
from gpipe_hpc.units import bytes_text, flops_text

_MOST_EVENTS: Final = 100
_MOST_POINTS: Final = 400  # maximum points of a curve; longer ones are averaged
_CURVES: Final = (
    ("loss", "loss of the global batch"),
    ("samples_per_s", "samples per second"),
    ("tokens_per_s", "tokens per second"),
    ("model_flops_per_s", "FLOP/s of the model, without recomputation"),
    ("share_of_peak", "share of the devices' peak"),
    ("bubble", "bubble: idle time over total"),
)


def report_of(record: Record) -> ReportDocument:
    """Return the report of one run."""
    account = account_of(record)
    return ReportDocument(f"Run {record.name}", list(_sections(record, account)))


def report_of_several(records: Sequence[Record]) -> ReportDocument:
    """Return a report that compares several runs, followed by the report of each."""
    accounts = [account_of(record) for record in records]
    names = _names(records)
    sections = [
        ReportSection("Side by side", [_standing(records, accounts, names)]),
        ReportSection("Where the time of a step goes", list(_bars(accounts, names))),
        ReportSection("Over time", list(_curves(records, names))),
        ReportSection("Settings that differ", [_differing(records, names)]),
    ]
    for record, account, name in zip(records, accounts, names, strict=True):
        sections += [
            each._replace(title=f"{name}: {each.title}", is_open=False)
            for each in _sections(record, account)
        ]
    return ReportDocument(f"Runs {', '.join(names)}", sections)


def _names(records: Sequence[Record]) -> list[str]:
    """Return a unique name for each run: its folder's name, numbered if names repeat."""
    names = [record.name for record in records]
    return [
        f"{name} ({place + 1})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def _sections(record: Record, account: Account | None) -> Iterator[ReportSection]:
    doubts = [Paragraph(f"Could not be read: {doubt}.") for doubt in record.doubts]
    figures = KeyFigures(list(_figures(record, account)))
    yield ReportSection("The run", [Paragraph(_outcome(record)), *doubts, figures])
    if account is not None:
        yield ReportSection("What would make it faster", [_advised(record, account)])
        yield ReportSection("Where the time of a step goes", list(_time(record, account)))
    if record.traced is not None:
        which = "" if record.traced.step is None else f"Step {record.traced.step}: "
        words = Paragraph(
            f"{which}the step with median time among those kept in memory. All ranks of all "
            f"replicas on one clock."
        )
        yield ReportSection("One step of all ranks", [words, Picture(record.traced)])
    yield ReportSection("Over time", list(_curves([record], [""])))
    if record.summary.get("ranks"):
        yield ReportSection("Ranks and memory", list(_ranks(record)))
    if record.summary.get("layout"):
        yield ReportSection("Cut and layout", list(_layout(record)))
    yield ReportSection("Events", list(_events(record)))
    yield ReportSection("Settings and versions", list(_settings(record)), is_open=False)


def _outcome(record: Record) -> str:
    summary = record.summary
    if not summary:
        return "The run has written no summary yet: it is running, or was killed."
    text = (
        f"{summary['outcome'].capitalize()} after step {summary['last_step']} of "
        f"{summary['steps_asked']}; started {summary['began']}, written {summary['written']}."
    )
    if record.is_overtaken:
        text += (
            f" A newer start has reached step {record.steps[-1]['step']} but has written no "
            "summary yet: ranks, memory and layout are those of the earlier start."
        )
    elif record.num_starts > 1:
        text += f" It was started {record.num_starts} times; figures are from the newest start."
    return f"{text} {summary['error']}" if summary.get("error") else text


def _figures(record: Record, account: Account | None) -> Iterator[tuple[str, str]]:
    """Yield the main figures of a run, in the same order for each run."""
    summary = record.summary
    loss, pace = summary.get("loss") or {}, summary.get("throughput") or {}
    step = summary.get("step") or {}
    last = record.steps[-1] if record.steps else {}
    if record.is_overtaken:
        loss, pace, step = {}, last, {}
    layout = summary.get("layout") or {}
    ranks = summary.get("ranks") or ()
    yield "loss", number(loss.get("last", last.get("loss")))
    yield "validation loss", number(loss.get("validation"))
    yield "step time", time_text(account.step_s if account else None)
    yield "samples per second", number(pace.get("samples_per_s", last.get("samples_per_s")))
    yield "tokens per second", number(pace.get("tokens_per_s", last.get("tokens_per_s")))
    flops = pace.get("model_flops_per_s")
    yield "FLOP/s", "-" if flops is None else flops_text(flops)
    yield "share of the devices' peak", percent(pace.get("share_of_peak"))
    yield "bubble", percent(step.get("bubble", last.get("bubble")))
    peaks = [each["peak_memory_bytes"] for each in ranks] or [last.get("peak_memory_bytes", 0)]
    yield "memory of the fullest rank", bytes_text(max(peaks)) if max(peaks) else "-"
    shape = ""
    if layout:
        shape = f"{layout['replicas']} x {layout['ranks'] // layout['replicas']} ranks"
    yield "layout", f"{shape}, {layout['schedule']}" if layout else "-"


def _advised(record: Record, account: Account) -> Block:
    findings: list[Finding] = findings_of(record, account)
    if not findings:
        return Paragraph("No change is known that would save more than 2 % of a step.")
    return Suggestions(findings, account.step_s)


def _time(record: Record, account: Account) -> Iterator[Block]:
    yield Paragraph(
        f"The mean of {account.num_steps} steps, with checkpoint time divided over them: "
        f"{time_text(account.step_s)} a step. The parts add up to it."
    )
    yield from _bars([account], ["a step"])
    rows = [
        [name, time_text(seconds), percent(seconds / account.step_s), PARTS[name]]
        for name, seconds in account.parts.items()
    ]
    total = ["all", time_text(account.step_s), percent(1.0), ""]
    yield Grid(["part", "time", "of a step", "meaning"], [*rows, total])
    if not account.ranks:
        yield Paragraph("No step was traced, so the time in the pipeline is not divided by cause.")
        return
    yield Paragraph("The same for each rank, in the pipeline of the traced step:")
    yield Bars([Bar(f"rank {share.rank}", share.seconds) for share in account.ranks])
    expected = record.summary.get("expected")
    if expected:
        yield Paragraph(
            f"Forecast before the run from measured layers: {time_text(expected['pipeline_s'])} "
            f"in the pipeline, bubble {percent(expected['bubble'])}; measured: "
            f"{time_text(account.pipeline_s)}."
        )


def _bars(accounts: Sequence[Account | None], names: Sequence[str]) -> Iterator[Block]:
    bars = [
        Bar(name, account.parts)
        for account, name in zip(accounts, names, strict=True)
        if account is not None
    ]
    if bars:
        yield Bars(bars)


def _curves(records: Sequence[Record], names: Sequence[str]) -> Iterator[Block]:
    for key, title in _CURVES:
        series: dict[str, Sequence[tuple[float, float]]] = {}
        for record, name in zip(records, names, strict=True):
            points = [(row["step"], row[key]) for row in record.steps if row.get(key) is not None]
            if points:
                series[name or key] = _thinned(points)
            if key == "loss":
                held = [
                    (row["step"], row["validation_loss"])
                    for row in record.others
                    if row.get("validation_loss") is not None
                ]
                if held:
                    series[f"{name} validation".strip()] = _thinned(held)
        if series:
            yield Curve(title, series)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce a curve to at most `_MOST_POINTS` points by averaging neighbours."""
    size = -(-len(points) // _MOST_POINTS)
    if size == 1:
        return list(points)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _ranks(record: Record) -> Iterator[Block]:
    head = ["rank", "host", "stages", "computed", "reading", "peak memory", "above start"]
    head += ["planned", "of plan", "of it activations", "workspace"]
    rows = []
    for each in record.summary["ranks"]:
        planned = each.get("planned_memory") or {}
        peak = each["peak_memory_bytes"]
        above = max(0, peak - each["memory_before_bytes"])
        rows.append(
            [
                str(each["rank"]),
                each["host"],
                ",".join(map(str, each["stages"])) or "none",
                time_text(each["busy_s"]),
                time_text(each.get("reading_s")),
                bytes_text(peak),
                bytes_text(above),
                bytes_text(planned["total_bytes"]) if planned else "-",
                percent(above / planned["total_bytes"] if planned.get("total_bytes") else None),
                *(
                    "-" if planned.get(part) is None else bytes_text(planned[part])
                    for part in ("activation_bytes", "workspace_bytes")
                ),
            ]
        )
    yield Grid(head, rows)
    meaning = record.summary.get("peak_memory_meaning")
    yield Paragraph(
        f"Peak memory: {meaning}. Above start: the part allocated since the start. Planned: "
        f"weights, gradients, optimizer, activations and workspace, counted; of plan: above start "
        f"as a share of planned. Workspace: temporary memory of running layers, gradients in "
        f"transit, receive buffers. Computed: compute time in the traced step."
    )


def _layout(record: Record) -> Iterator[Block]:
    layout = record.summary["layout"]
    counts = layout["layers_of_stages"]
    layers = record.summary.get("layers") or []
    yield Paragraph(
        f"{_some(layout['ranks'], 'rank')}: {_some(layout['replicas'], 'replica')} of "
        f"{_some(layout['stages'], 'stage')}; schedule {layout['schedule']}, "
        f"{_some(layout['microbatches'], 'micro-batch', 'es')}, recompute "
        f"{layout['recompute']}; cut by {layout['partition']}: "
        f"pipeline.partition=[{','.join(map(str, counts))}]"
    )
    took: dict[int, list[float]] = {}
    for each in timed_layers(record):
        took.setdefault(each.layer, []).append(each.took_s)
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    rows = [
        [
            str(index),
            told["kind"],
            str(stage),
            f"{told['parameters']:,}",
            flops_text(told["forward_flops"]),
            time_text(max(took[index])) if index in took else "-",
        ]
        for index, (told, stage) in enumerate(zip(layers, stages, strict=False))
    ]
    if rows:
        yield Grid(
            ["layer", "kind", "stage", "parameters", "forward, counted", "forward, measured"], rows
        )
        yield Paragraph(
            "For one micro-batch; measured in steps 2 to 4 after the start, on the slowest rank "
            "that holds the layer."
        )


def _events(record: Record) -> Iterator[Block]:
    skipped = next((r["skipped_steps"] for r in reversed(record.steps) if "skipped_steps" in r), 0)
    corrupt = next(
        (r["corrupt_samples"] for r in reversed(record.steps) if "corrupt_samples" in r), 0
    )
    yield Paragraph(
        f"Started {_some(max(1, record.num_starts), 'time')}, {_some(skipped or 0, 'step')} "
        f"skipped, {_some(corrupt or 0, 'corrupt sample')} left out."
    )
    yield from map(Paragraph, _stragglers(record))
    shown = record.happened[-_MOST_EVENTS:]
    if len(shown) < len(record.happened):
        yield Paragraph(f"The last {len(shown)} of {len(record.happened)}:")
    if shown:
        yield Grid(
            ["when", "kind", "ranks", "what", "times"],
            [
                [
                    each.moment,
                    each.level,
                    ",".join(map(str, each.ranks)),
                    each.text,
                    f"{each.times}",
                ]
                for each in shown
            ],
        )


def _stragglers(record: Record) -> Iterator[str]:
    """Yield a sentence for each rank that became slower: by which factor, and in which steps."""
    seen: dict[int, list[tuple[int, float]]] = {}
    for row in record.steps:
        if row.get("straggles") and row.get("straggling_rank") is not None:
            seen.setdefault(row["straggling_rank"], []).append((row["step"], row["straggles"]))
    for rank, rows in sorted(seen.items()):
        most = max(factor for _, factor in rows)
        yield (
            f"Straggler: rank {rank} computed up to {most:.2f} times as long as before, while "
            f"other ranks did not; reported from step {rows[0][0]} to {rows[-1][0]}."
        )


def _some(count: int, what: str, ending: str = "s") -> str:
    return f"{count} {what}{ending * (count != 1)}"


def _settings(record: Record) -> Iterator[Block]:
    versions = record.summary.get("versions") or {}
    if versions:
        yield Grid(["what", "version"], [[name, text] for name, text in versions.items()])
    rows = [[name, _value(value)] for name, value in record.settings.items()]
    if rows:
        yield Grid(["setting", "value"], rows)


def _value(value: Any) -> str:
    return "null" if value is None else str(value)


def _standing(
    records: Sequence[Record], accounts: Sequence[Account | None], names: Sequence[str]
) -> Block:
    columns = [
        dict(_figures(record, account)) for record, account in zip(records, accounts, strict=True)
    ]
    rows = [[what, *(column[what] for column in columns)] for what in columns[0]]
    return Grid(["", *names], rows)


def _differing(records: Sequence[Record], names: Sequence[str]) -> Block:
    known: dict[str, Mapping[str, Any]] = {}
    for name, record in zip(names, records, strict=True):
        known[name] = record.settings
    every = dict.fromkeys(setting for settings in known.values() for setting in settings)
    rows = []
    for setting in every:
        values = [
            _value(settings[setting]) if setting in settings else "not set"
            for settings in known.values()
        ]
        if len(set(values)) > 1:
            rows.append([setting, *values])
    return Grid(["setting", *names], rows) if rows else Paragraph("None.")
