"""The layouts that a search compares: combinations of settings."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from gpipe_hpc.errors import GpipeError
from gpipe_hpc.planner.cutting.partition import SIMULATED
from gpipe_hpc.planner.request import Request
from gpipe_hpc.schedule import canonical_schedule, num_rows, num_stages, one_table
from gpipe_hpc.schedule.families.rerouted import ORDERS

LEAST: Final = "least"
"""Recompute mode of a search: nothing if that fits, else as little as needed (``budget``)."""

_SCHEDULES: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("one_f_one_b", MappingProxyType({})),
    ("gpipe", MappingProxyType({})),
    ("interleaved", MappingProxyType({"stages_per_rank": 2})),
    ("interleaved", MappingProxyType({"stages_per_rank": 4})),
    ("looped_bfs", MappingProxyType({"stages_per_rank": 2})),
    ("zb_h1", MappingProxyType({})),
    ("zb_h2", MappingProxyType({})),
    ("zb_v", MappingProxyType({})),
    ("v_half", MappingProxyType({})),
    ("dualpipe_v", MappingProxyType({})),
    ("hanayo", MappingProxyType({"waves": 1})),
    ("hanayo", MappingProxyType({"waves": 2})),
    ("chimera", MappingProxyType({})),
    ("chimera", MappingProxyType({"scaling": "forward_doubling"})),
    ("dualpipe", MappingProxyType({})),
)
_MIRRORED: Final = frozenset({"chimera", "dualpipe", "gems"})
"""Bidirectional schedules: with one micro-batch half of the replicas would idle.

``gems`` is laid out only on request: with one micro-batch at a time on K ranks, each takes the
time of 2 K + 1 forwards, compared with 4 for ``one_f_one_b`` with full recomputation.
"""
SPLITTING: Final = frozenset({"zb_h1", "zb_h2", "zb_v", "v_half", "dualpipe_v", "dualpipe"})
"""Schedules that split the backward, so that weight gradients may be delayed."""
_MOST_TRIED: Final = 16


@dataclass(frozen=True)
class Candidate:
    """One layout to compare, without the settings for combining gradients, chosen after timing.

    Attributes:
      rows: number of partial replicas that one pipeline combines; then `replicas` is 1. Otherwise
        1.
      simulates_cut: whether the run shall search for a faster partition by simulation, though the
        user did not ask for it.
    """

    replicas: int
    stages: int
    microbatches: int
    schedule: str
    options: tuple[tuple[str, Any], ...] = ()
    recompute: str = LEAST
    offload: bool = False
    precision: str | None = None  # set if several are compared
    rows: int = 1
    simulates_cut: bool = False

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of all replicas."""
        return self.replicas * self.stages

    @property
    def shared_by(self) -> int | None:
        """Return the number of ranks if the stages have unequal numbers of ranks, else None.

        The partition depends on it.
        """
        return self.num_ranks if self.rows > 1 and "copies" not in dict(self.options) else None

    @property
    def written(self) -> "Candidate":
        """Return the layout as user settings, with each partial replica counted as a replica.

        The result is only for printing settings; it cannot be laid out.
        """
        if self.rows == 1:
            return self
        options = dict(self.options)
        order, stages = options.pop("order"), options.pop("stages")
        return replace(
            self,
            replicas=self.rows,
            stages=stages,
            microbatches=self.microbatches // self.rows,
            schedule=order,
            options=tuple(options.items()),
            rows=1,
        )

    @property
    def num_stages(self) -> int:
        """Return the number of stages; raise ScheduleError if the schedule is impossible."""
        return num_stages(
            self.schedule, ranks=self.stages, microbatches=self.microbatches, **dict(self.options)
        )

    def samples(self, batch_size: int) -> int:
        """Return the number of samples of the largest micro-batch."""
        return -(-batch_size // (self.replicas * self.microbatches))

    def of(self, base: Request) -> Request:
        """Return the request for this layout; other settings are those of `base`."""
        return replace(
            base,
            stages=self.stages,
            replicas=self.replicas,
            microbatches=self.microbatches,
            schedule=self.schedule,
            schedule_options=dict(self.options),
            recompute="never" if self.recompute == LEAST else self.recompute,
            offload=self.offload,
            optimizer_states=base.kept_states._replace(gradient_copies=0),
            outer=replace(base.combining, weights=None),
            partition=SIMULATED if self.simulates_cut else base.partition,
        )

    def overrides(self) -> list[str]:
        """Return this layout's settings as written on the command line.

        If some replica is partial, they include the number of ranks.
        """
        asked = self.written
        words = [
            f"pipeline.replicas={asked.replicas}",
            f"pipeline.stages={asked.stages}",
            f"pipeline.microbatches={asked.microbatches}",
            f"pipeline.schedule={asked.schedule}",
        ]
        words += [f"pipeline.ranks={self.num_ranks}"] * (self.rows > 1)
        words += [f"pipeline.options.{name}={value}" for name, value in asked.options]
        words.append(f"pipeline.recompute={self.recompute}")
        words += ["pipeline.offload=true"] * self.offload
        words += [f"pipeline.partition={SIMULATED}"] * self.simulates_cut
        return words if self.precision is None else [*words, f"train.precision={self.precision}"]


@dataclass(frozen=True)
class Space:
    """The set of layouts among which a search chooses.

    Attributes:
      base: the requested settings.
      batch_size: samples of a step, equal in all layouts.
      num_layers: layers of the model, the maximum number of stages.
      fixed: names of settings that keep their value of `base` (fields of `Request` and `Outer`).
      offloads: values of offload to try.
      precision: precision of all layouts if several are compared, each with its own space.
    """

    base: Request
    num_ranks: int
    batch_size: int
    num_layers: int
    fixed: frozenset[str] = frozenset()
    offloads: tuple[bool, ...] = (False,)
    precision: str | None = None

    def of(self, num_ranks: int) -> "Space":
        """Return the search space with the same settings on another number of ranks."""
        return replace(self, num_ranks=num_ranks)

    def shapes(self) -> list[tuple[int, int]]:
        """Return all (replicas, stages) that use all ranks and give each rank some work."""
        found = []
        for stages in range(1, self.num_ranks + 1):
            replicas, rest = divmod(self.num_ranks, stages)
            is_asked = (
                not rest and self._may_be("stages", stages) and self._may_be("replicas", replicas)
            )
            if is_asked and stages <= self.num_layers and replicas <= self.batch_size:
                found.append((replicas, stages))
        return found

    @property
    def is_empty(self) -> bool:
        """Return whether the space contains no layout."""
        return not (self.shapes() or self.shapes_with_holes())

    def shapes_with_holes(self) -> list[tuple[int, int]]:
        """Return all (replicas, stages) for which the last replica lacks some ranks."""
        found = []
        most, pinned = min(self.num_ranks - 1, self.num_layers), self.base.stages
        numbers: Iterable[int] = numbers_of_stages(most)
        if "stages" in self.fixed and isinstance(pinned, int):
            numbers = [pinned] if pinned <= most else []
        for stages in numbers:
            asked = self.base.replicas if "replicas" in self.fixed else 1
            rows = num_rows(self.num_ranks, stages, asked)
            if rows is None or rows > self.batch_size or not self._may_be("stages", stages):
                continue
            found.append((rows, stages))
        return found if found and self._may_have_holes(*found[0]) else []

    def __iter__(self) -> Iterator[Candidate]:
        """Yield all layouts of the space; some may prove to be invalid."""
        yield from self._whole()
        yield from self._with_holes()

    def _with_holes(self) -> Iterator[Candidate]:
        for rows, stages in self.shapes_with_holes():
            for microbatches in self._microbatches(rows):
                for order in self._orders():
                    table = one_table(
                        self.num_ranks, stages, rows * microbatches, order, self._options
                    )
                    for offload in self._offloads():
                        yield Candidate(
                            1,
                            table.ranks,
                            table.microbatches,
                            table.schedule,
                            tuple(table.options.items()),
                            self._recompute(),
                            offload,
                            self.precision,
                            rows,
                        )

    def _may_have_holes(self, rows: int, stages: int) -> bool:
        """Return whether the other settings support partial replicas."""
        orders = self._orders()
        if not orders:
            return False
        try:
            base = replace(self.base, schedule=orders[0], schedule_options=dict(self._options))
            base.in_rows(self.num_ranks, stages, rows)
        except GpipeError:
            return False
        return True

    def _orders(self) -> tuple[str, ...]:
        """Return the orders of actions to try with partial replicas."""
        if "schedule" not in self.fixed:
            return tuple(o for o in ORDERS if not (self.base.compile and o in SPLITTING))
        given = self.base.schedule
        name = canonical_schedule(given) if isinstance(given, str) else ""
        return (name,) if name in ORDERS else ()

    @property
    def _options(self) -> Mapping[str, Any]:
        return self.base.options if "schedule" in self.fixed else {}

    def _whole(self) -> Iterator[Candidate]:
        for replicas, stages in self.shapes():
            for microbatches in self._microbatches(replicas):
                for schedule, options in self._schedules(stages):
                    if microbatches == 1 and schedule in _MIRRORED:
                        continue
                    for offload in self._offloads():
                        yield Candidate(
                            replicas,
                            stages,
                            microbatches,
                            schedule,
                            tuple(options.items()),
                            self._recompute(),
                            offload,
                            self.precision,
                        )

    def _may_be(self, name: str, value: object) -> bool:
        return name not in self.fixed or getattr(self.base, name) in (None, value)

    def _microbatches(self, replicas: int) -> list[int]:
        """Return numbers of micro-batches whose sizes are powers of two, none of them empty."""
        share = self.batch_size // replicas
        if "microbatches" in self.fixed:
            given = self.base.microbatches
            return [given]
        sizes = [2**power for power in range(share.bit_length())] + [share]
        numbers = {-(-self.batch_size // (replicas * size)) for size in sizes}
        return sorted(n for n in numbers if n * replicas <= self.batch_size)

    def _schedules(self, stages: int) -> list[tuple[str, Mapping[str, Any]]]:
        if "schedule" in self.fixed:
            given = self.base.schedule
            name = canonical_schedule(given) if isinstance(given, str) else str(given)
            if self.base.options or name not in [each for each, _ in _SCHEDULES]:
                return [(name, self.base.options)]
            return [each for each in _SCHEDULES if each[0] == name]
        if stages == 1:
            return [_SCHEDULES[0]]
        return [
            each
            for each in _SCHEDULES
            if not (self.base.compile and each[0] in SPLITTING) and self._has_room(stages, *each)
        ]

    def _has_room(self, stages: int, schedule: str, options: Mapping[str, Any]) -> bool:
        try:
            return num_stages(schedule, ranks=stages, microbatches=1, **options) <= self.num_layers
        except GpipeError:
            return False

    def _recompute(self) -> str:
        return self.base.recompute if "recompute" in self.fixed else LEAST

    def _offloads(self) -> tuple[bool, ...]:
        return (self.base.offload,) if "offload" in self.fixed else self.offloads


def numbers_of_stages(most: int) -> Iterator[int]:
    """Yield numbers of stages to try, up to `most`: all up to 16, then in growing steps."""
    stages = 1
    while stages <= most:
        yield stages
        stages += max(1, stages // _MOST_TRIED * 2)
