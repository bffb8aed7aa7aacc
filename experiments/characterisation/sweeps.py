"""The varied parameters, and the settings of each point."""

from typing import Final, NamedTuple

from gpipe_hpc.bench.sweep import Point

_POINT: Final = Point(ranks=2, threads=1, batch_size=16, microbatches=4, backend="gloo")


class Setting(NamedTuple):
    """A line of a table: its label, the contestant, and further settings."""

    name: str
    point: Point
    words: tuple[str, ...] = ()


class Sweep(NamedTuple):
    """A table in which one parameter varies."""

    title: str
    setting: str
    settings: tuple[Setting, ...]

    @property
    def name(self) -> str:
        """Return the title as an argument of the command line."""
        return self.title.lower().replace(" ", "_")


def sweeps() -> tuple[Sweep, ...]:
    """Return all tables for a machine with two cores."""
    return (_batches(), _threads(), _processes(), _backends())


def _batches() -> Sweep:
    settings = (
        Setting(f"batch {size}", _POINT._replace(batch_size=size)) for size in (4, 8, 16, 32, 64)
    )
    return Sweep(
        "Batch size",
        "Two stages, four micro-batches",
        tuple(settings),
    )


def _threads() -> Sweep:
    alone = _POINT._replace(ranks=1)
    settings = (Setting(f"{n} threads", alone._replace(threads=n)) for n in (1, 2, 4))
    return Sweep("Threads", "One process, threads within operators", tuple(settings))


def _processes() -> Sweep:
    return Sweep(
        "Processes",
        "The same two cores as threads of one process, stages of a pipeline, or replicas",
        (
            Setting("1 process, 1 thread", _POINT._replace(ranks=1)),
            Setting("1 process, 2 threads", _POINT._replace(ranks=1, threads=2)),
            Setting("2 stages", _POINT),
            Setting("2 replicas", _POINT, ("pipeline.stages=1", "pipeline.replicas=2")),
            Setting("4 stages, 2 a core", _POINT._replace(ranks=4)),
        ),
    )


def _backends() -> Sweep:
    tcp = ("comm.shared_memory=false",)
    return Sweep(
        "Backend",
        "Two stages, tensors sent in different ways",
        (
            Setting("gloo, shared memory", _POINT),
            Setting("gloo, TCP alone", _POINT, tcp),
            Setting("mpi, shared memory", _POINT._replace(backend="mpi")),
            Setting("mpi alone", _POINT._replace(backend="mpi"), tcp),
        ),
    )
