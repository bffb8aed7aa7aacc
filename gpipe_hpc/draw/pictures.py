"""Select timelines to draw, and render them in the requested format."""

import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from gpipe_hpc.config import check_drawing, num_planned_ranks, on_ranks, portions_of
from gpipe_hpc.draw.tables import schedules_table
from gpipe_hpc.errors import ConfigError, os_remedy
from gpipe_hpc.schedule import (
    Costs,
    Op,
    Schedule,
    Timeline,
    build,
    costs_for_others,
    lower,
    mean_costs,
    num_stages,
    recompute_of,
    schedule_of,
    simulate,
)
from gpipe_hpc.schedule.passes.gathers import add_gathers
from gpipe_hpc.schedule.table.placements import copies_in_rows
from gpipe_hpc.settings import Config, refuse
from gpipe_hpc.trainer.traces.files import read_trace, typical_trace
from gpipe_hpc.visualize import draw_text
from gpipe_hpc.visualize.chrome_trace import chrome_trace
from gpipe_hpc.visualize.comparison import compare
from gpipe_hpc.visualize.html import render_html
from gpipe_hpc.visualize.layout import layout
from gpipe_hpc.visualize.png import render_png
from gpipe_hpc.visualize.svg import render_svg
from gpipe_hpc.visualize.text import draw_text_memory, num_columns

DEFAULT_STAGES = 4

Table = Sequence[Sequence[str]]


class DrawnTimelines(NamedTuple):
    """Timelines to draw below each other on one time scale, and a table for their caption.

    `unit` is the unit of their times; empty if they have none.
    """

    timelines: tuple[Timeline, ...]
    unit: str = ""
    table: Table = ()


class PictureSize(NamedTuple):
    """Width of a picture, and columns of a text page; None if unlimited."""

    width: int | None = None
    columns: int | None = None


_ENDINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "": "text",
        ".txt": "text",
        ".svg": "svg",
        ".png": "png",
        ".html": "html",
        ".json": "trace",
        ".md": "table",
    }
)


def draw(config: Config, columns: int | None = None, given: Collection[str] = ()) -> str | bytes:
    """Return the picture, page, trace or table that the settings request.

    With run.dir: the measured step of median time, then its simulation, then the schedules of
    draw.compare. Otherwise simulated schedules.

    Args:
        config: The settings.
        given: Names of the settings on the command line. With run.dir, pipeline.schedule is
            compared only if it is one of them.
        columns: Width of the terminal; longer lines continue in panels below.
    """
    check_drawing(config)
    if config.pipeline.stages == "fit":
        raise refuse(
            "pipeline.stages",
            "a number, because a drawing has no model to which stages could be fitted",
            "fit",
            "set the number that python -m gpipe_hpc.plan chooses",
        )
    form = format_of(config)
    if form == "table":
        return schedules_table(config, config.pipeline.stages or DEFAULT_STAGES)
    run, size = config.run.dir, PictureSize(config.draw.width, columns)
    return _FORMATS[form](measured(Path(run), config, given) if run else simulated(config), size)


def format_of(config: Config) -> str:
    """Return the output format: draw.format, or that of the extension of draw.out, or text.

    Raises ConfigError for an unknown extension.
    """
    settings = config.draw
    ending = Path(settings.out or "").suffix.lower()
    if settings.format != "auto":
        return settings.format
    if ending not in _ENDINGS:
        raise refuse(
            "draw.out",
            f"a file that ends in one of {', '.join(filter(None, _ENDINGS))}",
            settings.out,
            "correct it, or set draw.format",
        )
    return _ENDINGS[ending]


def write_picture(picture: str | bytes, out: str | None) -> None:
    """Write a picture to a file, or to standard output if there is no file."""
    if out:
        data = picture.encode("utf-8") if isinstance(picture, str) else picture
        try:
            Path(out).write_bytes(data)
        except OSError as error:
            raise ConfigError(
                f"config: bad draw.out, expected a file in an existing folder, got {out!r} "
                f"({error.strerror}); {os_remedy(error) or 'correct it, or create the folder'}"
            ) from error
        print(f"wrote {out}")
    elif isinstance(picture, str):
        print(picture)
    elif sys.stdout.isatty():
        raise ConfigError(
            "config: bad draw.out, expected a file for a binary picture, got a terminal; set "
            "draw.out=FILE"
        )
    else:
        sys.stdout.buffer.write(picture)


def columns_of_terminal(out: str | None) -> int | None:
    """Return the width of the terminal in columns; None if the output is not a terminal."""
    return None if out or not sys.stdout.isatty() else shutil.get_terminal_size().columns


def measured(run_folder: Path, config: Config, given: Collection[str]) -> DrawnTimelines:
    """Return the step of a run that has the median time, followed by simulations.

    The first simulation runs the measured schedule with the mean time of each operation on each
    stage and free transfers: the difference is time that these costs do not explain. Simulations of
    other schedules have the same costs.
    """
    for setting in _OF_THE_RUN:
        if setting in given:
            raise refuse(
                setting,
                "no value together with run.dir, because the run sets it",
                attrgetter(setting)(config),
                "leave it out",
            )
    timeline = read_trace(typical_trace(run_folder))
    # Without communication: a run records no transfers, and a reduction cannot depend on an action
    # that the run did not record, such as an empty W.
    planned = simulate(schedule_of(timeline), mean_costs(timeline))
    recompute = config.pipeline.recompute
    if "pipeline.recompute" not in given:
        recompute = recompute_of(timeline)
    others = _chosen(config) if "pipeline.schedule" in given else _chosen(config)[1:]
    return DrawnTimelines(
        (
            replace(timeline, name=f"{timeline.name}, measured"),
            replace(planned, name=f"{timeline.name}, simulated from measured costs"),
            *(_elsewise(timeline, name, options, recompute) for name, options in others),
        ),
        "s",
        compare(timeline, planned),
    )


_OF_THE_RUN: Final = (
    "pipeline.stages",
    "pipeline.microbatches",
    "train.accumulation",
    "draw.costs.forward",
    "draw.costs.backward",
    "draw.costs.input_gradient",
    "draw.costs.weight_gradient",
    "draw.costs.recompute",
    "draw.costs.send",
)


def _elsewise(
    timeline: Timeline, name: str, options: Mapping[str, Any], recompute: str
) -> Timeline:
    """Simulate another schedule with the measured costs of a run."""
    costs = costs_for_others(timeline)
    ranks, microbatches = timeline.num_ranks, timeline.num_microbatches
    if name == "auto":
        count = num_stages(name, ranks=ranks, microbatches=microbatches, **options)
        options = {"costs": costs.recut(ranks, count), **options}
    schedule = build(name, ranks=ranks, microbatches=microbatches, recompute=recompute, **options)
    own = costs.recut(schedule.num_ranks, schedule.num_stages)
    words = f"{name}, simulated from measured costs"
    if _splits(schedule) and not any(e.action.op is Op.I for row in timeline.events for e in row):
        words += " (I and W as halves of B)"
    return replace(simulate(schedule, own), name=words)


def _splits(schedule: Schedule) -> bool:
    return any(action.op is Op.I for row in schedule.ranks for action in row)


def _chosen(config: Config) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the schedules to draw, with options: pipeline.schedule and draw.compare."""
    pipeline = config.pipeline
    return [(pipeline.schedule, pipeline.options), *((name, {}) for name in config.draw.compare)]


def simulated(config: Config) -> DrawnTimelines:
    """Simulate pipeline.schedule and the schedules of draw.compare.

    All have the same model and ranks: a number in draw.costs is the time of one rank's share of the
    model.
    """
    pipeline = config.pipeline
    costs = Costs(
        forward=config.draw.costs.forward,
        backward=config.draw.costs.backward,
        input_gradient=config.draw.costs.input_gradient,
        weight_gradient=config.draw.costs.weight_gradient,
        recompute=config.draw.costs.recompute,
        send=config.draw.costs.send,
        reduction=config.draw.costs.reduction,
        reduces_within=config.outer.overlap,
        gather=config.draw.costs.gather,
    )
    timelines: list[Timeline] = []
    for name, options in _chosen(config):
        chosen = replace(config, pipeline=replace(pipeline, schedule=name, options=dict(options)))
        asked = on_ranks(chosen, num_planned_ranks(config, DEFAULT_STAGES))
        schedule = build(
            asked.pipeline.schedule,
            ranks=_ranks_of(asked),
            microbatches=portions_of(asked).most,
            recompute=pipeline.recompute,
            **asked.pipeline.options,
        )
        copies = copies_in_rows(schedule.placement)
        own = costs.recut(schedule.num_ranks, schedule.num_stages, copies)
        timelines.append(simulate(_with_outer(schedule, config), own))
    return DrawnTimelines(tuple(timelines))


def _ranks_of(config: Config) -> int:
    """Return the number of ranks of a pipeline; raise ConfigError if none is possible."""
    pipeline = config.pipeline
    if pipeline.ranks is None or pipeline.stages == pipeline.ranks:
        return pipeline.stages or DEFAULT_STAGES
    stages = pipeline.stages or pipeline.ranks // pipeline.num_replicas
    if stages * pipeline.num_replicas != pipeline.ranks:
        raise refuse(
            "pipeline.ranks",
            f"stages x replicas = {stages} x {pipeline.num_replicas}",
            pipeline.ranks,
            "set pipeline.replicas, or leave it out",
        )
    return stages


def _with_outer(schedule: Schedule, config: Config) -> Schedule:
    """Add transfers, gradient reductions and, with sharded parameters, all-gathers."""
    if schedule.is_lowered:
        return schedule
    buckets = dict.fromkeys(range(schedule.num_stages), config.draw.buckets)
    lowered = lower(schedule, buckets if config.draw.buckets > 1 else None)
    return add_gathers(lowered, buckets) if config.outer.shard == "flat" else lowered


def _text(subject: DrawnTimelines, size: PictureSize) -> str:
    longest = max(timeline.makespan for timeline in subject.timelines)
    columns = size.width or num_columns(subject.timelines)
    parts: list[str] = []
    for timeline in subject.timelines:
        share = timeline.makespan / longest if longest > 0 else 1.0
        own = max(1, round(columns * share))
        title = [f"{timeline.name}:"] if len(subject.timelines) > 1 else []
        picture = draw_text(timeline, own, subject.unit, size.columns)
        parts.append(
            "\n".join([*title, picture, "", draw_text_memory(timeline, own, size.columns)])
        )
    if subject.table:
        parts.append(_table(subject.table))
    return "\n\n".join(parts)


def _table(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    )


def _svg(subject: DrawnTimelines, size: PictureSize) -> str:
    timelines, unit, table = subject
    return render_svg(layout(timelines, unit=unit, width=size.width, table=table))


def _png(subject: DrawnTimelines, size: PictureSize) -> bytes:
    timelines, unit, table = subject
    return render_png(layout(timelines, unit=unit, width=size.width, table=table))


def _html(subject: DrawnTimelines, size: PictureSize) -> str:
    timelines, unit, table = subject
    scene = layout(timelines, unit=unit, width=size.width)
    return render_html(scene, ", ".join(timeline.name for timeline in timelines), table)


def _trace(subject: DrawnTimelines, size: PictureSize) -> str:
    return chrome_trace(subject.timelines)


_FORMATS: Final[Mapping[str, Callable[[DrawnTimelines, PictureSize], str | bytes]]] = (
    MappingProxyType({"text": _text, "svg": _svg, "png": _png, "html": _html, "trace": _trace})
)
