"""Run a search over layouts and format its result: the fastest layouts, or why none fits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from gpipe_hpc.config import check_planning
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.planner.search.candidates import Space
from gpipe_hpc.planner.search.minimum_ranks import MinimumRanks
from gpipe_hpc.planner.search.ranking import Ranking, merged, search
from gpipe_hpc.planner.search.text import (
    counts_text,
    machine_text,
    notes_text,
    precisions_text,
    table_text,
)
from gpipe_hpc.planner.search.trial import CandidateEvaluation, CombiningChoices, MemoryExcess
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.search.from_settings import LayoutSearch, StartedRanks
from gpipe_hpc.units import bytes_text

_MAX_LISTED: Final = 8  # maximum number of ranks listed with their shortage


class SearchAnswer(NamedTuple):
    """Result of a search: the fastest layout (None if none fits), its text, and the ranking."""

    chosen: CandidateEvaluation | None
    text: str
    ranking: Ranking


def compared(config: Config, words: Sequence[str] = ()) -> SearchAnswer:
    """Search the layouts that the settings allow, keeping the layout settings of the command line.

    `words` are the settings on the command line. Raises ConfigError, ModelError or PartitionError
    for settings that are invalid on any number of ranks.
    """
    check_planning(config, None)
    return _ranked(LayoutSearch.in_each_precision(config, words))


def compared_on(config: Config, words: Sequence[str], ranks: StartedRanks) -> SearchAnswer:
    """Search like `compared`, for the running ranks `came`."""
    return _ranked([LayoutSearch.of(config, words, ranks)])


def _ranked(searches: Sequence[LayoutSearch]) -> SearchAnswer:
    config = searches[0].config
    num_ranks = searches[0].num_ranks()
    heads = ["\n".join(f"Warning: {doubt}" for doubt in searches[0].doubts)]
    heads = [*filter(None, heads)]
    if num_ranks is None:
        fewest = _fewest(searches)
        num_ranks = fewest.num_ranks
        heads.append(_fewest_text(fewest, config))
    return _answer(searches, num_ranks, heads)


def _fewest(searches: Sequence[LayoutSearch]) -> MinimumRanks:
    """Return the smallest number of ranks in any precision; raise ConfigError if there is none."""
    found, refusals = [], []
    for each in searches:
        try:
            found.append(each.fewest())
        except ConfigError as refusal:
            refusals.append(refusal)
    if not found:
        raise refusals[0]
    return min(found, key=lambda fewest: fewest.num_ranks)


def _answer(searches: Sequence[LayoutSearch], num_ranks: int, heads: Sequence[str]) -> SearchAnswer:
    config = searches[0].config
    spaces = [each.space(num_ranks) for each in searches]
    caches = [each.on(num_ranks) for each in searches]
    space, cache = spaces[0], caches[0]
    if space.is_empty:
        raise _unfactored(space)
    ranking = merged([search(*each) for each in zip(spaces, caches, strict=True)])
    choices = CombiningChoices.of(space.base, space.fixed, len(cache.machine.cluster.hosts))
    num_ways = len(list(choices.all()))
    measured = searches[0].measured
    machine = "\n".join([machine_text(cache, space, measured), *searches[0].notes])
    if space.precision is not None:
        pairs = zip(spaces, caches, strict=True)
        machine = f"{machine}\n{precisions_text(pairs, is_measured=bool(measured))}"
    parts = [*heads, machine, counts_text(ranking, num_ways)]
    if not ranking.trials:
        parts.append(_lacking_text(searches, ranking, num_ranks))
        return SearchAnswer(None, "\n\n".join(parts), ranking)
    parts.append(table_text(ranking, space.base, config.train.batch_size, config.plan.shown))
    parts.append(notes_text(cache, _layers_as(searches[0]), _rest_as(config)))
    return SearchAnswer(ranking.trials[0], "\n\n".join(parts), ranking)


def _layers_as(searching: LayoutSearch) -> str:
    """Describe how the layer times were obtained."""
    if searching.notes:
        return "measured by a run (plan.calibration)"
    return "measured here" if searching.measured else "counted"


def _rest_as(config: Config) -> str:
    """Return the setting from which the overheads of a step are taken."""
    return "plan.calibration" if config.plan.prices is None else "plan.prices"


def _unfactored(space: Space) -> ConfigError:
    """Return the error for a number of ranks that valid replicas x stages cannot fill.

    The message suggests the nearest valid numbers.
    """
    most = space.num_layers * space.batch_size
    near = [n for n in range(space.num_ranks - 1, 0, -1) if not space.of(n).is_empty][:1]
    near += [
        n
        for n in range(space.num_ranks + 1, min(most, 2 * space.num_ranks) + 1)
        if not space.of(n).is_empty
    ][:1]
    fixed = [
        f"pipeline.{n}={getattr(space.base, n)}" for n in ("stages", "replicas") if n in space.fixed
    ]
    return ConfigError(
        f"plan.ranks: {space.num_ranks} ranks cannot be divided into replicas x stages with at "
        f"most {space.num_layers} stages (layers of the model) and at most {space.batch_size} "
        f"replicas (train.batch_size){' and ' * bool(fixed)}{', '.join(fixed)}; use "
        f"{' or '.join(map(str, near)) or 'another number of'} ranks, or a larger batch"
    )


def _fewest_text(fewest: MinimumRanks, config: Config) -> str:
    limit = config.pipeline.memory_bytes
    ranks = "1 rank" if fewest.num_ranks == 1 else f"{fewest.num_ranks} ranks"
    parts = [f"the model fits on {ranks} of {bytes_text(limit)}", fewest.fewer_text()]
    if fewest.nearest is not None:
        parts.append(_missing(fewest.nearest))
    return "; ".join(filter(None, parts))


def _missing(nearest: MemoryExcess) -> str:
    candidate = nearest.candidate
    ranks = "1 rank" if candidate.num_ranks == 1 else f"{candidate.num_ranks} ranks"
    return (
        f"on {ranks}, the closest layout ({' '.join(candidate.overrides())}) needs "
        f"{bytes_text(nearest.nbytes)} on rank {nearest.rank}, {bytes_text(nearest.excess_bytes)} "
        f"too much "
        f"({bytes_text(nearest.lasting_bytes)} of it weights, gradients, optimizer and workspace)"
        f"{_others_missing(nearest)}"
    )


def _others_missing(nearest: MemoryExcess) -> str:
    """Describe how much memory the other ranks lack, the largest shortage first."""
    others = {r: lack for r, lack in enumerate(nearest.lacks) if lack and r != nearest.rank}
    worst = sorted(others, key=lambda rank: -others[rank])
    told = [f"rank {rank} {bytes_text(others[rank])}" for rank in worst[:_MAX_LISTED]]
    if len(worst) > _MAX_LISTED:
        told.append(f"and {len(worst) - _MAX_LISTED} more ranks, each less")
    return f"; other ranks lack: {', '.join(told)}" if told else ""


def _lacking_text(searches: Sequence[LayoutSearch], ranking: Ranking, num_ranks: int) -> str:
    """Describe how much memory the closest layout lacks, and how many ranks suffice."""
    lines = []
    limit = searches[0].config.pipeline.memory_bytes
    if limit is None:
        return f"no layout can be built: {ranking.refusal}"
    if ranking.nearest is not None:
        lines.append(f"no layout fits: {_missing(ranking.nearest)}")
    elif ranking.refusal and not ranking.num_too_much:
        return f"no layout can be built: {ranking.refusal}"
    else:
        lines.append("no layout fits: weights, gradients and optimizer state alone are too large")
    least, each = limit, bytes_text(limit) if not isinstance(limit, list) else ""
    if isinstance(limit, list):
        least = min(map(float, limit))
        each = f"{bytes_text(least)} (the smallest of pipeline.memory_bytes)"
    try:
        fewest = _fewest([_within(own, least) for own in searches])
    except ConfigError as error:
        return f"{lines[0]}\nno sufficient number of ranks was found: {error}"
    do = f"plan.ranks={fewest.num_ranks} {' '.join(fewest.layout.overrides())}"
    if fewest.num_ranks < num_ranks:
        lines.append(f"{fewest.num_ranks} instead of {num_ranks} ranks of {each} suffice: {do}")
    else:
        lines.append(f"{fewest.num_ranks} ranks of {each} suffice: {do}")
    return "\n".join(lines)


def _within(searching: LayoutSearch, memory_bytes: float) -> LayoutSearch:
    """Return the same search with one memory limit for all ranks."""
    config = searching.config
    pipeline = replace(config.pipeline, memory_bytes=memory_bytes)
    return replace(searching, config=replace(config, pipeline=pipeline))
