"""The answer of a search, in words: which layouts are best, or what they all lack."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from gpipe_hpc.config import check_planning
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.planner.search.candidates import Space
from gpipe_hpc.planner.search.fewest import Fewest
from gpipe_hpc.planner.search.ranking import Ranking, merged, search
from gpipe_hpc.planner.search.text import (
    counts_text,
    machine_text,
    notes_text,
    precisions_text,
    table_text,
)
from gpipe_hpc.planner.search.trial import Choices, TooMuch, Trial
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.search.from_settings import Came, Searching
from gpipe_hpc.units import bytes_text

_TOLD: Final = 8  # ranks of which it is said what they lack


class Answer(NamedTuple):
    """The best layout, None where none fits; what to say; the ranking."""

    chosen: Trial | None
    text: str
    ranking: Ranking


def compared(config: Config, words: Sequence[str] = ()) -> Answer:
    """Search the layouts that the settings allow; `words` are the command line, which stays.

    Raises ConfigError, ModelError or PartitionError for what cannot work on any number of ranks.
    """
    check_planning(config, None)
    return _ranked(Searching.in_each_precision(config, words))


def compared_on(config: Config, words: Sequence[str], came: Came) -> Answer:
    """Search, as `compared` does, on the ranks of a run that has begun."""
    return _ranked([Searching.of(config, words, came)])


def _ranked(searches: Sequence[Searching]) -> Answer:
    config = searches[0].config
    num_ranks = searches[0].num_ranks()
    heads = ["\n".join(f"Warning: {doubt}" for doubt in searches[0].doubts)]
    heads = [*filter(None, heads)]
    if num_ranks is None:
        fewest = _fewest(searches)
        num_ranks = fewest.num_ranks
        heads.append(_fewest_text(fewest, config))
    return _answer(searches, num_ranks, heads)


def _fewest(searches: Sequence[Searching]) -> Fewest:
    """Return the least number of ranks in any precision; ConfigError if there is none."""
    found, refusals = [], []
    for each in searches:
        try:
            found.append(each.fewest())
        except ConfigError as refusal:
            refusals.append(refusal)
    if not found:
        raise refusals[0]
    return min(found, key=lambda fewest: fewest.num_ranks)


def _answer(searches: Sequence[Searching], num_ranks: int, heads: Sequence[str]) -> Answer:
    config = searches[0].config
    spaces = [each.space(num_ranks) for each in searches]
    grounds = [each.on(num_ranks) for each in searches]
    space, ground = spaces[0], grounds[0]
    if space.is_empty:
        raise _unfactored(space)
    ranking = merged([search(*each) for each in zip(spaces, grounds, strict=True)])
    choices = Choices.of(space.base, space.fixed, len(ground.machine.cluster.hosts))
    num_ways = len(list(choices.all()))
    measured = searches[0].measured
    machine = "\n".join([machine_text(ground, space, measured), *searches[0].notes])
    if space.precision is not None:
        pairs = zip(spaces, grounds, strict=True)
        machine = f"{machine}\n{precisions_text(pairs, is_measured=bool(measured))}"
    parts = [*heads, machine, counts_text(ranking, num_ways)]
    if not ranking.trials:
        parts.append(_lacking_text(searches, ranking, num_ranks))
        return Answer(None, "\n\n".join(parts), ranking)
    parts.append(table_text(ranking, space.base, config.train.batch_size, config.plan.shown))
    parts.append(notes_text(ground, _layers_as(searches[0]), _rest_as(config)))
    return Answer(ranking.trials[0], "\n\n".join(parts), ranking)


def _layers_as(searching: Searching) -> str:
    """Say where the times of layers are from."""
    if searching.notes:
        return "measured by a run (plan.calibration)"
    return "measured here" if searching.measured else "counted"


def _rest_as(config: Config) -> str:
    """Return the setting that the times of all else of a step are from, if they are known."""
    return "plan.calibration" if config.plan.prices is None else "plan.prices"


def _unfactored(space: Space) -> ConfigError:
    """Return why no replicas x stages fill the ranks, with the next number that some do."""
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
        f"plan.ranks: {space.num_ranks} ranks cannot be factored, expected replicas x stages with "
        f"at most {space.num_layers} stages, the layers of the model, and at most "
        f"{space.batch_size} replicas, the samples of train.batch_size"
        f"{' and ' * bool(fixed)}{', '.join(fixed)}, got none; take "
        f"{' or '.join(map(str, near)) or 'another number of'} ranks, or a larger batch"
    )


def _fewest_text(fewest: Fewest, config: Config) -> str:
    limit = config.pipeline.memory_bytes
    ranks = "1 rank" if fewest.num_ranks == 1 else f"{fewest.num_ranks} ranks"
    parts = [f"the model fits on {ranks} of {bytes_text(limit)}", fewest.fewer_text()]
    if fewest.nearest is not None:
        parts.append(_missing(fewest.nearest))
    return "; ".join(filter(None, parts))


def _missing(nearest: TooMuch) -> str:
    candidate = nearest.candidate
    ranks = "1 rank" if candidate.num_ranks == 1 else f"{candidate.num_ranks} ranks"
    return (
        f"on {ranks}, rank {nearest.rank} of what needs least ({' '.join(candidate.overrides())}) "
        f"holds {bytes_text(nearest.nbytes)}, {bytes_text(nearest.excess_bytes)} too much "
        f"({bytes_text(nearest.lasting_bytes)} of it weights, gradients, optimizer and workspace)"
        f"{_others_missing(nearest)}"
    )


def _others_missing(nearest: TooMuch) -> str:
    """Return what the other ranks lack, those first that lack most."""
    others = {r: lack for r, lack in enumerate(nearest.lacks) if lack and r != nearest.rank}
    worst = sorted(others, key=lambda rank: -others[rank])
    told = [f"rank {rank} {bytes_text(others[rank])}" for rank in worst[:_TOLD]]
    told += [f"and {len(worst) - _TOLD} more ranks less"] if len(worst) > _TOLD else []
    return f"; the others lack: {', '.join(told)}" if told else ""


def _lacking_text(searches: Sequence[Searching], ranking: Ranking, num_ranks: int) -> str:
    """Say what lacks, and how many ranks would do."""
    lines = []
    limit = searches[0].config.pipeline.memory_bytes
    if limit is None:
        return f"no layout can be built: {ranking.refusal}"
    if ranking.nearest is not None:
        lines.append(f"no layout fits: {_missing(ranking.nearest)}")
    elif ranking.refusal and not ranking.num_too_much:
        return f"no layout can be built: {ranking.refusal}"
    else:
        lines.append("no layout fits: the weights, gradients and optimizer alone are too much")
    least, each = limit, bytes_text(limit) if not isinstance(limit, list) else ""
    if isinstance(limit, list):
        least = min(map(float, limit))
        each = f"{bytes_text(least)}, the least of pipeline.memory_bytes,"
    try:
        fewest = _fewest([_within(own, least) for own in searches])
    except ConfigError as error:
        return f"{lines[0]}\nno number of ranks that would do was found: {error}"
    do = f"plan.ranks={fewest.num_ranks} {' '.join(fewest.layout.overrides())}"
    if fewest.num_ranks < num_ranks:
        lines.append(f"fewer ranks of {each} would do, {fewest.num_ranks} of {num_ranks}: {do}")
    else:
        lines.append(f"{fewest.num_ranks} ranks of {each} would do: {do}")
    return "\n".join(lines)


def _within(searching: Searching, memory_bytes: float) -> Searching:
    """Return the same search for ranks that may all fill so many bytes."""
    config = searching.config
    pipeline = replace(config.pipeline, memory_bytes=memory_bytes)
    return replace(searching, config=replace(config, pipeline=pipeline))
