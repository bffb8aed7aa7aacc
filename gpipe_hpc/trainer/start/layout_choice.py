"""Search of the best layout for the current ranks (`pipeline.layout=auto`).

The result is stored in the run folder, so that a restart uses the same layout.
"""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpipe_hpc.comm.watchdog.heartbeat import run_with_heartbeat
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.config import check_config
from gpipe_hpc.data.shapes import samples_per_microbatch
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.planner.costs.rates import Rates, host_copy_rate
from gpipe_hpc.planner.costs.speed import paces_of_times
from gpipe_hpc.planner.cutting.distance import Distance
from gpipe_hpc.planner.cutting.partition import SIMULATED
from gpipe_hpc.planner.memory.by_rank import MeasuredSlowdowns
from gpipe_hpc.settings import Config
from gpipe_hpc.small_files import read_json
from gpipe_hpc.trainer.machines import rates_of
from gpipe_hpc.trainer.run.changed_settings import settings_of
from gpipe_hpc.trainer.run.identity import RunIdentity
from gpipe_hpc.trainer.search.answer import compared_on
from gpipe_hpc.trainer.search.from_settings import (
    PINS,
    StartedRanks,
    cost_model_of_layers,
    fixed_by,
)

LAYOUT_FILE: Final = "layout.json"
_SHOWN: Final = 3  # layouts listed in the log

_Layout = dict[str, dict[str, Any]]  # chosen settings, by section


class ChosenLayout(NamedTuple):
    """Settings with the chosen layout, warnings about them, and rank 0's report of the search."""

    config: Config
    doubts: Sequence[str]
    said: str


class _BestLayout(NamedTuple):
    """Result of a search: the fastest layout, and a report.

    `off_best_cut` is the distance of its partition from the best one; None on one rank.
    """

    layout: _Layout
    text: str
    off_best_cut: Distance | None = None


def with_layout(
    config: Config, world: World, run: RunIdentity, words: Sequence[str]
) -> ChosenLayout | None:
    """Return the settings with the fastest layout for the current ranks; None without a search.

    Collective. Rank 0 searches, unless an earlier start of the run has stored a result for the same
    settings and number of ranks. Layout settings in `words`, the command line, are not changed.
    Raises ConfigError if no layout fits.
    """
    if not config.pipeline.is_searched:
        return None
    where, path = "choosing the layout", run.folder / LAYOUT_FILE
    asked = _question(config, world.size, words)
    with collective_errors(world, where):
        found = _load(path, asked) if world.rank == 0 else None
        is_known: bool = world.world_group.broadcast_object(found is not None, root=0)
    if not is_known:
        came = _measure_ranks(config, world)
        search = None if came is None else partial(_choose, config, words, came)
        found = run_with_heartbeat(world, where, search)
    with collective_errors(world, where):
        if found is not None and not is_known and run.lineage:
            _store(path, asked, found)
        told = None if found is None else _shared_layout(found.layout)
        layout: _Layout = world.world_group.broadcast_object(told, root=0)
    said = ""
    if found is not None:
        layout = found.layout
        said = f"pipeline.layout=auto: {' '.join(_words(layout))}\n{found.text}"
    known = _settings(config, layout)
    return ChosenLayout(_with_paces(known, layout), check_config(known, world.size), said)


def _question(config: Config, num_ranks: int, words: Sequence[str]) -> dict[str, Any]:
    """Return the settings and number of ranks that the result of a search depends on, as JSON."""
    settings = settings_of(config)
    kept = {name: settings.get(name) for name in ("model", "data", "pipeline", "outer")}
    plan = {name: value for name, value in vars(config.plan).items() if name != "shown"}
    sizes = {"batch_size": config.train.batch_size, "precision": config.train.precision}
    told = {**kept, "plan": plan, **sizes, "ranks": num_ranks, "fixed": sorted(fixed_by(words))}
    found: dict[str, Any] = json.loads(json.dumps(told, default=str))
    return found


def _load(path: Path, asked: Mapping[str, Any]) -> _BestLayout | None:
    """Load the layout that an earlier start found for the same settings and ranks, or None."""
    try:
        told = read_json(path)
        layout: _Layout = {name: dict(told["layout"][name]) for name in PINS}
        off = told.get("off_best_cut")
        distance = None if off is None else Distance(float(off["share"]), bool(off["is_exact"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    allowed = {"pipeline": {*PINS["pipeline"], "options", "paces"}, "outer": {*PINS["outer"]}}
    is_ours = all(set(layout[name]) <= allowed[name] for name in PINS)
    if not is_ours or told.get("asked") != asked:
        return None
    said = "" if distance is None else f"; {distance.text()}"
    return _BestLayout(layout, f"loaded from {path}{said}", distance)


def _store(path: Path, asked: Mapping[str, Any], found: _BestLayout) -> None:
    off = found.off_best_cut
    told = {
        "layout": found.layout,
        "settings": _words(found.layout),
        "off_best_cut": None if off is None else off._asdict(),
        "asked": asked,
    }
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    aside.replace(path)


def _shared_layout(layout: _Layout) -> _Layout:
    """Return a layout without the slowdowns of ranks, which only rank 0 needs."""
    paces = {"paces": ()} if "paces" in layout["pipeline"] else {}
    return layout | {"pipeline": layout["pipeline"] | paces}


def _measure_ranks(config: Config, world: World) -> StartedRanks | None:
    """Measure each rank's speed; return speeds and hosts on rank 0, None elsewhere. Collective."""
    where = "measuring the speed of ranks"
    took_s = None
    if config.plan.measures_layers and world.size > 1:
        took_s = run_with_heartbeat(world, where, partial(_layers_s, config, world))
    with collective_errors(world, where):
        own = rates_of(config, world.device, is_here=True)
        if took_s is None:
            took_s = 1 / own.products
        copied = host_copy_rate(world.device)
        fastest, slowest = world.world_group.merge_object((own, copied), _extremes)
        # Only a few bytes per rank, as rank 0 may receive thousands of messages.
        host = sha256(socket.gethostname().encode()).digest()[:8]
        told = world.world_group.gather_object((took_s, host), root=0)
    if told is None:
        return None
    hosts = tuple(len(list(group)) for _, group in groupby(host for _, host in told))
    paces = paces_of_times([seconds for seconds, _ in told])
    return StartedRanks(fastest, hosts, paces if len(set(paces)) > 1 else (), slowest)


_Rates = tuple[Rates, float | None]
"""Compute rates of a rank, and its host copy rate (None if it has no accelerator)."""


def _extremes(ahead: _Rates, behind: _Rates) -> _Rates:
    """Merge rates of two groups of ranks: the fastest compute rates and the slowest host copies."""
    fastest = max(ahead[0], behind[0], key=lambda rates: rates.products)
    one, other = ahead[1], behind[1]
    return fastest, None if one is None or other is None else min(one, other)


def _layers_s(config: Config, world: World) -> float:
    """Return the seconds that the model's layers take on this rank, run one by one.

    All ranks run the same micro-batch size, that of the settings without a search.
    """
    num_samples = samples_per_microbatch(config)
    times = cost_model_of_layers(config, world.device, num_samples).times
    return sum(each.forward + each.backward for each in times)


def _choose(config: Config, words: Sequence[str], came: StartedRanks) -> _BestLayout:
    """Search the fastest layout; raise ConfigError if none fits."""
    shown = min(_SHOWN, config.plan.shown)
    answer = compared_on(replace(config, plan=replace(config.plan, shown=shown)), words, came)
    if answer.chosen is None:
        raise ConfigError(f"pipeline.layout: auto found no layout\n{answer.text}")
    candidate, combining = answer.chosen.candidate.written, answer.chosen.combining
    paces = answer.chosen.request.paces
    layout: _Layout = {
        "pipeline": {
            "replicas": candidate.replicas,
            "stages": candidate.stages,
            "microbatches": candidate.microbatches,
            "schedule": candidate.schedule,
            "options": dict(candidate.options),
            "recompute": candidate.recompute,
            "offload": candidate.offload,
            **({"partition": SIMULATED} if candidate.simulates_cut else {}),
            # The measured slowdowns, so that the run uses the partition that was compared.
            **({"paces": [*paces]} if came.paces and not isinstance(paces, str | None) else {}),
        },
        "outer": {} if combining is None else combining._asdict(),
    }
    return _BestLayout(layout, answer.text, answer.chosen.cut_distance)


def _words(layout: Mapping[str, Any]) -> list[str]:
    """Return a layout as command line settings."""
    found = []
    for section, settings in layout.items():
        for name, value in settings.items():
            if name == "options":
                found += [f"{section}.options.{key}={each}" for key, each in value.items()]
            else:
                found.append(f"{section}.{name}={str(value).lower().replace(' ', '')}")
    return found


def _settings(config: Config, layout: _Layout) -> Config:
    """Return the settings with a layout, except the measured slowdown of ranks."""
    chosen = {name: value for name, value in layout["pipeline"].items() if name != "paces"}
    return replace(
        config,
        pipeline=replace(config.pipeline, layout="given", **chosen),
        outer=replace(config.outer, **layout["outer"]),
    )


def _with_paces(config: Config, layout: _Layout) -> Config:
    """Return the settings with the measured slowdown of ranks, if the layout contains it."""
    if "paces" not in layout["pipeline"]:
        return config
    paces = MeasuredSlowdowns(layout["pipeline"]["paces"])
    return replace(config, pipeline=replace(config.pipeline, paces=paces))
