"""Build schedules by name, and look up the names, options and stage counts of schedules."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.families.from_file import from_file
from gpipe_hpc.schedule.families.known import FAMILIES
from gpipe_hpc.schedule.families.options import check_integer
from gpipe_hpc.schedule.garbage import collector_paused
from gpipe_hpc.schedule.passes.recompute import add_recompute
from gpipe_hpc.schedule.search.auto import MemoryAllowance, auto, place
from gpipe_hpc.schedule.table.actions import Op
from gpipe_hpc.schedule.table.schedule import Placement, Schedule

_NO_OPTIONS: Final = ("ranks", "microbatches", "within")
# Ranks x micro-batches of a table: larger ones would fill the memory of a host. GPT-3 on 64 ranks,
# each sample of its batch of 1536 a micro-batch, has 98,304.
_LARGEST: Final = 4_000_000

# Each function takes (ranks, microbatches) and its own options as further keywords.
SCHEDULES: Final[Mapping[str, Callable[..., Schedule]]] = MappingProxyType(
    {**FAMILIES, "auto": auto, "file": from_file}
)


# Names in papers and other runtimes, in lower case with letters and digits only.
_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "1f1b": "one_f_one_b",
        "pipedreamflush": "one_f_one_b",
        "dapple": "one_f_one_b",
        "filldrain": "gpipe",
        "afab": "gpipe",
        "bfs": "looped_bfs",
        "interleaved1f1b": "interleaved",
        "zbv": "zb_v",
        "zbvzerobubble": "zb_v",
        "vhalf": "v_half",
        "recycle": "rerouted",
    }
)


def canonical_schedule(name: str) -> str:
    """Return the schedule that a common name or alias refers to; `name` itself if unknown."""
    bare = re.sub(r"[^a-z0-9]", "", name.lower())
    known = {each.replace("_", ""): each for each in SCHEDULES}
    return known.get(bare) or _ALIASES.get(bare, name)


def nearest_schedule(name: str) -> str | None:
    """Return the schedule with the most similar name, or None."""
    bare = re.sub(r"[^a-z0-9]", "", name.lower())
    known = {**_ALIASES, **{each.replace("_", ""): each for each in SCHEDULES}}
    found = get_close_matches(bare, known, n=1)
    return known[found[0]] if found else None


def _unknown_option(name: str, option: str, known: Sequence[str]) -> ScheduleError:
    """Return the error for an unknown option, with the nearest option or schedules that have it."""
    meant = get_close_matches(option.lower(), known, n=1)
    others = [
        each for each, build in SCHEDULES.items() if option in inspect.signature(build).parameters
    ]
    hint = f"did you mean {meant[0]}? " if meant else ""
    if not meant and others:
        hint = f"{option} is an option of {', '.join(others)}: "
    return ScheduleError(
        f"schedule {name!r}: unknown option {option!r}, expected "
        f"{'one of ' + ', '.join(known) if known else 'no options'}; {hint}"
        f"correct or remove it (pipeline.options.{option})"
    )


def _options_of(name: str) -> list[str]:
    return [key for key in inspect.signature(SCHEDULES[name]).parameters if key not in _NO_OPTIONS]


def schedule_names() -> tuple[str, ...]:
    """Return the names that `build` accepts."""
    return tuple(SCHEDULES)


@collector_paused()
def build(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    recompute: str = "never",
    within: Callable[[Placement], MemoryAllowance] | None = None,
    **options: Any,
) -> Schedule:
    """Build the compute-only table of a named schedule.

    Args:
        name: one of `schedule_names()`, or the schedule's name in a paper or another runtime.
        ranks: number of ranks of one pipeline.
        microbatches: number of micro-batches per step of one pipeline.
        recompute: ``always``, ``except_last`` or ``never``.
        within: function that returns the ranks' memory limits for a placement; for ``auto`` only.
        options: keywords of the schedule.

    Raises:
        ScheduleError: the name, an option or a number is invalid.
    """
    name = _checked(name, ranks, microbatches, options)
    if within is not None:
        if name != "auto" or not callable(within):  # a user passed it as an option
            raise _unknown_option(name, "within", _options_of(name))
        options = {**options, "within": within}
    bare = SCHEDULES[name](ranks=ranks, microbatches=microbatches, **options)
    if Op.R in bare.ops:
        return bare  # a file that contains recomputation
    return add_recompute(bare, recompute)


def num_stages(name: str, *, ranks: int, microbatches: int, **options: Any) -> int:
    """Return the number of stages of the table that `build` would make.

    Raises ScheduleError for unknown names and options.
    """
    name = _checked(name, ranks, microbatches, options)
    parameters = inspect.signature(SCHEDULES[name]).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.name not in _NO_OPTIONS}
    return _NUM_STAGES.get(name, partial(_times, 1))(ranks, microbatches, **{**defaults, **options})


def _checked(name: str, ranks: int, microbatches: int, options: Mapping[str, Any]) -> str:
    """Return the canonical name of a schedule; raise for unknown names and options."""
    name = canonical_schedule(name)
    if name not in SCHEDULES:
        meant = nearest_schedule(name)
        hint = f"; did you mean {meant}?" if meant else ""
        raise ScheduleError(
            f"schedule: unknown name {name!r}, expected one of {', '.join(SCHEDULES)}{hint}"
        )
    known = _options_of(name)
    for option in options:
        if option not in known:
            raise _unknown_option(name, option, known)
    check_integer(name, "ranks", ranks)
    check_integer(name, "microbatches", microbatches)
    if ranks * microbatches > _LARGEST:
        raise ScheduleError(
            f"schedule {name!r}: {microbatches} micro-batches on {ranks} rank(s) are too many for "
            f"a table, expected at most {_LARGEST} micro-batches x ranks, got "
            f"{ranks * microbatches}; lower pipeline.microbatches, train.accumulation or "
            f"pipeline.stages"
        )
    return name


def _times(each: int, ranks: int, microbatches: int, **_: Any) -> int:
    return each * ranks


def _by_option(
    name: str, option: str, each: int, ranks: int, microbatches: int, **options: Any
) -> int:
    return each * ranks * check_integer(name, option, options[option])


def _placed(
    ranks: int,
    microbatches: int,
    placement: str,
    stages_per_rank: int,
    stages: int | None,
    copies: Sequence[int] | None,
    **_: Any,
) -> int:
    return place(placement, ranks, microbatches, stages_per_rank, stages, copies).num_stages


def _in_rows(ranks: int, microbatches: int, stages: int | None, **_: Any) -> int:
    return ranks if stages is None else check_integer("rerouted", "stages", stages)


def _read(ranks: int, microbatches: int, path: str) -> int:
    return from_file(ranks, microbatches, path).num_stages


# Number of stages, where it differs from the number of ranks; same arguments as `SCHEDULES`.
_NUM_STAGES: Final[Mapping[str, Callable[..., int]]] = MappingProxyType(
    {
        "looped_bfs": partial(_by_option, "looped_bfs", "stages_per_rank", 1),
        "interleaved": partial(_by_option, "interleaved", "stages_per_rank", 1),
        "hanayo": partial(_by_option, "hanayo", "waves", 2),
        "zb_v": partial(_times, 2),
        "v_half": partial(_times, 2),
        "dualpipe_v": partial(_times, 2),
        "rerouted": _in_rows,
        "auto": _placed,
        "file": _read,
    }
)
