"""The layouts that a search compares: all settings together that may stand in a line."""

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
"""In place of a way to recompute: nothing where that fits, else as little as does (``budget``)."""

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
"""Those of two directions: with one micro-batch half of the copies would idle.

``gems`` is laid out only where it is asked for: with one micro-batch under way on K ranks, each
takes 2 K + 1 forwards, where ``one_f_one_b`` that recomputes everything takes 4.
"""
SPLITTING: Final = frozenset({"zb_h1", "zb_h2", "zb_v", "v_half", "dualpipe_v", "dualpipe"})
"""Those in which weight gradients may wait."""
_MOST_TRIED: Final = 16


@dataclass(frozen=True)
class Candidate:
    """One layout, but for how copies combine their gradients, which is chosen once it is timed.

    Pipelines with holes are one replica on all ranks, as their table is; `rows`: of how many
    pipelines that is, 1 where there are no holes. `simulates_cut`: whether the run is to look for a
    faster cut than that with even stages, though nobody asked for it.
    """

    replicas: int
    stages: int
    microbatches: int
    schedule: str
    options: tuple[tuple[str, Any], ...] = ()
    recompute: str = LEAST
    offload: bool = False
    precision: str | None = None  # where several are compared
    rows: int = 1
    simulates_cut: bool = False

    @property
    def num_ranks(self) -> int:
        """Return on how many ranks it is."""
        return self.replicas * self.stages

    @property
    def shared_by(self) -> int | None:
        """Return how many ranks share the stages unequally, so the cut heeds it; None: equally."""
        return self.num_ranks if self.rows > 1 and "copies" not in dict(self.options) else None

    @property
    def written(self) -> "Candidate":
        """Return it as a user asks for it: with holes as rows of stages, which ranks do not fill.

        Of that, only the settings mean something.
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
        """Return how many stages the model is cut into; ScheduleError where there is no table."""
        return num_stages(
            self.schedule, ranks=self.stages, microbatches=self.microbatches, **dict(self.options)
        )

    def samples(self, batch_size: int) -> int:
        """Return the samples of the largest micro-batch."""
        return -(-batch_size // (self.replicas * self.microbatches))

    def of(self, base: Request) -> Request:
        """Return the request for it; what it says nothing of is as in `base`."""
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
        """Return it as it is written on a command line, with the ranks where these make holes."""
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
    """Out of which layouts one is to be found.

    `base`: the settings that are asked for. Those whose name is in `fixed` stay as they are there;
    names are the fields of `Request`, and those of `Outer`. `batch_size`: samples of a step, the
    same in all layouts. `num_layers`: of the model, the most stages there can be. `offloads`: what
    it tries of moving activations to the host. `precision`: of all its layouts, where others are
    compared with them, which have a space of their own.
    """

    base: Request
    num_ranks: int
    batch_size: int
    num_layers: int
    fixed: frozenset[str] = frozenset()
    offloads: tuple[bool, ...] = (False,)
    precision: str | None = None

    def of(self, num_ranks: int) -> "Space":
        """Return the same on another number of ranks."""
        return replace(self, num_ranks=num_ranks)

    def shapes(self) -> list[tuple[int, int]]:
        """Return (replicas, stages) that fill the ranks and get some work each."""
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
        """Say whether there is no layout."""
        return not (self.shapes() or self.shapes_with_holes())

    def shapes_with_holes(self) -> list[tuple[int, int]]:
        """Return (pipelines, stages of each) that ranks do not fill, so the last one has holes."""
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
        """Yield all layouts; some may turn out to be refused."""
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
        """Say whether what is asked for beside the layout goes with holes."""
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
        """Return the orders of rows with holes that may be."""
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
        """Return numbers of micro-batches whose samples double, and none of which is empty."""
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
    """Yield numbers of stages to try: all up to 16, and as many more in growing steps."""
    stages = 1
    while stages <= most:
        yield stages
        stages += max(1, stages // _MOST_TRIED * 2)
