"""The runs and faults of a soak test, drawn from its seed.

A *run* is one run folder. It suffers `FAULTS_OF_A_RUN` faults; after each it is restarted and
continues. The same seed gives the same faults for any requested number, so that one of them can be
repeated alone.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

FAULTS_OF_A_RUN: Final = 5
ALL_MICROBATCHES: Final = 12  # micro-batches of a step over all replicas, equal in every layout
BATCH_SIZE: Final = 24


class Kind(Enum):
    """The kind of a fault; the value is its name in tables."""

    KILL = "kill -9 of a rank"
    STOP = "SIGSTOP of a rank"
    EXCEPTION = "exception in a layer"
    EXIT = "a rank leaves with an exit code"
    DISK = "full disk"
    KILL_IN_SAVE = "kill -9 of a rank while it saves"
    PREEMPTION = "preemption"
    CORRUPTION = "all killed, newest checkpoint corrupted"
    LOSS = "all killed"
    WATCHER = "kill -9 of a rank's watcher"
    CUT = "cut link"
    HOST = "a host loses its power"


# On one machine, and on two hosts with a link between them.
_HERE: Final = (
    Kind.KILL,
    Kind.STOP,
    Kind.EXCEPTION,
    Kind.EXIT,
    Kind.DISK,
    Kind.KILL_IN_SAVE,
    Kind.PREEMPTION,
    Kind.CORRUPTION,
    Kind.LOSS,
    Kind.WATCHER,
)
_ON_HOSTS: Final = (Kind.CUT, Kind.HOST, Kind.CUT, Kind.KILL, Kind.STOP)
_EVERY_SO_MANYTH_ON_HOSTS: Final = 5

_WAYS: Final[dict[Kind, tuple[str, ...]]] = {
    Kind.EXCEPTION: ("forward", "backward"),
    Kind.EXIT: ("os._exit(0)", "os._exit(7)", "sys.exit(3)"),
    Kind.KILL_IN_SAVE: ("before its file", "after its file"),
    Kind.PREEMPTION: ("SIGTERM to all", "SIGTERM to one", "SIGUSR1 to all"),
    Kind.CORRUPTION: ("a flipped byte", "a short file", "a missing file", "an empty manifest"),
}


@dataclass(frozen=True)
class Layout:
    """Number of ranks and their settings."""

    ranks: int
    stages: int
    replicas: int
    schedule: str
    options: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Return the settings as arguments."""
        return (
            f"pipeline.stages={self.stages}",
            f"pipeline.replicas={self.replicas}",
            f"pipeline.microbatches={ALL_MICROBATCHES // self.replicas}",
            f"pipeline.schedule={self.schedule}",
            *(f"pipeline.options.{option}" for option in self.options),
        )

    def __str__(self) -> str:
        """Return a short description."""
        return f"{self.ranks} ranks, {self.stages} x {self.replicas} {self.schedule}"


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, the rank, the time, and the layout of the restart.

    `steps` are the steps of this start before the fault, `pause_s` a delay after them, `after` the
    layout of the restart.
    """

    number: int
    kind: Kind
    way: str
    victim: int
    steps: int
    pause_s: float
    layout: Layout
    after: Layout


@dataclass(frozen=True)
class Run:
    """One run folder and its faults; `words` are settings of all its starts."""

    number: int
    on_hosts: bool
    keeps_layout: bool
    words: tuple[str, ...]
    faults: tuple[Fault, ...]


def _layouts() -> Iterator[Layout]:
    for ranks in range(2, 9):
        for stages in (1, 2, 3, 4, 5, 6, 8):
            replicas = -(-ranks // stages)
            if stages > ranks or ALL_MICROBATCHES % replicas or (stages == 1 and ranks > 4):
                continue
            if ranks % stages:
                if stages in (2, 4):
                    for schedule in ("gpipe", "zb_h1"):
                        yield Layout(ranks, stages, replicas, schedule)
                continue
            for schedule in ("gpipe", "one_f_one_b", "zb_h1"):
                yield Layout(ranks, stages, replicas, schedule)
            if stages in (2, 4):
                for schedule in ("zb_v", "chimera", "dualpipe_v"):
                    yield Layout(ranks, stages, replicas, schedule)
            if stages in (2, 3):
                yield Layout(ranks, stages, replicas, "interleaved", ("stages_per_rank=2",))


LAYOUTS: Final = tuple(_layouts())


class _Deck:
    """Kinds in random order; each occurs with its frequency before the deck is refilled."""

    def __init__(self, cards: Sequence[Kind], rng: random.Random) -> None:
        self._cards, self._rng = tuple(cards), rng
        self._left: list[Kind] = []

    def next(self) -> Kind:
        if not self._left:
            self._left = self._rng.sample(self._cards, len(self._cards))
        return self._left.pop()


def draw(
    seed: int, num_faults: int, most_ranks: int = 8, with_hosts: bool = True
) -> tuple[Run, ...]:
    """Return the runs with the given total number of faults; the last run may have fewer.

    `most_ranks` limits every layout. `with_hosts` places some runs on two hosts.
    """
    rng = random.Random(f"soak {seed}")
    here, on_hosts = _Deck(_HERE, rng), _Deck(_ON_HOSTS, rng)
    layouts = [layout for layout in LAYOUTS if layout.ranks <= most_ranks]
    runs: list[Run] = []
    for first in range(0, num_faults, FAULTS_OF_A_RUN):
        number = len(runs)
        has_hosts = with_hosts and number % _EVERY_SO_MANYTH_ON_HOSTS == 2
        keeps = rng.random() < 0.5
        words = _words_of_run(rng, keeps)
        layout = _by_ranks(rng, layouts)
        faults = []
        for place in range(first, first + FAULTS_OF_A_RUN):
            after = layout if keeps else _by_ranks(rng, layouts)
            kind = (on_hosts if has_hosts else here).next()
            faults.append(_fault(rng, place, kind, layout, after))
            layout = after
        kept = faults[: num_faults - first]
        runs.append(Run(number, has_hosts, keeps, words, tuple(kept)))
    return tuple(runs)


def _words_of_run(rng: random.Random, keeps_layout: bool) -> tuple[str, ...]:
    words = [
        f"model.dtype={rng.choice(('float32', 'float64')) if keeps_layout else 'float64'}",
        f"checkpoint.in_background={rng.choice(('true', 'false'))}",
        f"checkpoint.neighbour_every={rng.choice((0, 3))}",
        f"pipeline.recompute={rng.choice(('always', 'except_last', 'never'))}",
        f"train.seed={rng.randrange(1000)}",
    ]
    return tuple(words)


def _by_ranks(rng: random.Random, layouts: Sequence[Layout]) -> Layout:
    """Draw a number of ranks, then a layout with it, because layouts are unevenly distributed."""
    ranks = rng.choice(sorted({layout.ranks for layout in layouts}))
    return rng.choice([layout for layout in layouts if layout.ranks == ranks])


def _fault(rng: random.Random, number: int, kind: Kind, layout: Layout, after: Layout) -> Fault:
    return Fault(
        number=number,
        kind=kind,
        way=rng.choice(_WAYS.get(kind, ("",))),
        victim=rng.randrange(layout.ranks),
        steps=rng.randrange(4, 14),
        pause_s=round(rng.uniform(0.0, 0.3), 3),
        layout=layout,
        after=after,
    )
