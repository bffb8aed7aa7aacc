"""The rows: settings of `gpipe_hpc.train`, and the ranks of each host."""

from typing import Final, NamedTuple

Places = tuple[tuple[int, ...], tuple[int, ...]]

# Settings of every row. The learning rate is constant, so that losses compare at any time; a row
# ends by its time, not by its number of steps.
COMMON: Final = (
    "model=gpt",
    "model.num_layers=4",
    "model.width=256",
    "data=python_source",
    "data.seq_len=64",
    "train.batch_size=8",
    "train.steps=1000000",
    "train.validate_batches=8",
    "optimizer=adamw",
    "optimizer.lr=1e-3",
    "lr.decay=constant",
    "lr.warmup_steps=20",
    "pipeline.partition=parameters",
    "pipeline.recompute=never",
    "checkpoint.every=0",
    "trace.steps=0",
    # Ranks in namespaces of one machine would otherwise send through shared memory.
    "comm.shared_memory=false",
)

_ONE_EACH: Final[Places] = ((0,), (1,))
_TWO_EACH: Final[Places] = ((0, 1), (2, 3))
_STAGE_A_HOST: Final[Places] = ((0, 2), (1, 3))  # rank = replica x stages + stage


class Row(NamedTuple):
    """Settings and places of the ranks; `validate_every` is a number of steps."""

    name: str
    what: str
    places: Places
    overrides: tuple[str, ...]
    validate_every: int


def _replicas(
    name: str, what: str, *overrides: str, validate_every: int, places: Places = _ONE_EACH
) -> Row:
    """Return a row of replicas with one rank each."""
    replicas = f"pipeline.replicas={sum(map(len, places))}"
    settings = (replicas, "pipeline.microbatches=1", *overrides)
    return Row(name, what, places, settings, validate_every)


BASE: Final = "plain"

# Methods that combine replicas over the link.
METHODS: Final = (
    _replicas(BASE, "2 replicas, one on each host; every gradient is summed", validate_every=5),
    *(
        _replicas(name, f"the same, {what}", f"outer.compress={name}", validate_every=every)
        for name, what, every in (
            ("bfloat16", "in 2 bytes a number", 10),
            ("qsgd", "in 4 bits a number", 20),
            ("topk", "1 number in 100", 20),
            ("powersgd", "in two factors of rank 2", 20),
        )
    ),
    _replicas(
        "local_sgd",
        "2 replicas train separately, averaged every 16 steps",
        "outer=local_sgd",
        "outer.every=16",
        validate_every=32,
    ),
    _replicas(
        "diloco",
        "2 replicas train separately, an outer step every 64",
        "outer=diloco",
        "outer.every=64",
        validate_every=64,
    ),
    _replicas(
        "diloco_parts",
        "the same in 4 parts, which arrive 8 steps later",
        "outer=diloco",
        "outer.every=64",
        "outer.parts=4",
        "outer.behind=8",
        "outer.bucket_bytes=3MB",
        validate_every=64,
    ),
    _replicas(
        "plain_4",
        "4 replicas, two on each host; every gradient is summed",
        validate_every=5,
        places=_TWO_EACH,
    ),
    _replicas(
        "hierarchy",
        "the same, first within each host and then between them",
        "outer.hierarchy=host",
        validate_every=5,
        places=_TWO_EACH,
    ),
)


def _layout(name: str, what: str, places: Places, *overrides: str, validate_every: int) -> Row:
    return Row(name, what, places, ("pipeline.stages=2", *overrides), validate_every)


# Layouts that place the link at different boundaries; micro-batches of two samples.
LAYOUTS: Final = (
    _layout(
        "stages",
        "1 pipeline of 2 stages, one on each host",
        _ONE_EACH,
        "pipeline.microbatches=4",
        validate_every=20,
    ),
    _layout(
        "replicas_of_2",
        "2 pipelines of 2 stages, one on each host",
        _TWO_EACH,
        "pipeline.replicas=2",
        "pipeline.microbatches=2",
        validate_every=5,
    ),
    _layout(
        "stages_of_2",
        "2 pipelines of 2 stages, the first stages of both on one host",
        _STAGE_A_HOST,
        "pipeline.replicas=2",
        "pipeline.microbatches=2",
        validate_every=20,
    ),
)

ROWS: Final = {row.name: row for row in (*METHODS, *LAYOUTS)}
