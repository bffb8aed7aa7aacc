"""The layouts to plan and run, with 1, 2 and 4 ranks."""

from collections.abc import Iterator
from typing import Final, NamedTuple

MODELS: Final = {
    "mlp": (
        "model=mlp",
        "model.widths=[256,1024,1024,1024,1024,1024,1024,10]",
        "data=synthetic_vectors",
        "data.width=256",
        "train.batch_size=256",
    ),
    "gpt": ("model=gpt", "data=synthetic", "data.seq_len=64", "train.batch_size=32"),
    "resnet": (
        "model=resnet_small",
        "data=synthetic_images",
        "data.height=32",
        "data.width=32",
        "data.num_classes=10",
        "train.batch_size=32",
    ),
    "encoder": (
        "model=bert48",
        "model.vocab_size=257",
        "model.block_size=64",
        "model.num_layers=4",
        "model.num_heads=4",
        "model.width=128",
        "model.dropout=0.0",
        "data=synthetic",
        "data.objective=masked",
        "data.seq_len=64",
        "train.batch_size=32",
    ),
    "gpt2": (
        "model=gpt2",
        "data=synthetic",
        "data.seq_len=128",
        "data.vocab_size=50257",
        "train.batch_size=4",
    ),
}
_LARGE: Final = ("gpt2",)  # only a few layouts, to compare memory
_PLAIN: Final = ("gpipe", "one_f_one_b")
_ON_TWO: Final = (
    "looped_bfs",
    "interleaved",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_half",
    "gems",
    "chimera",
    "dualpipe",
    "dualpipe_v",
    "hanayo",
)


class Planned(NamedTuple):
    """A layout: its name, model, numbers of ranks and replicas, and settings."""

    name: str
    model: str
    ranks: int
    replicas: int
    words: tuple[str, ...]


def layouts(only: str = "") -> list[Planned]:
    """Return the layouts whose names have a given prefix."""
    found = [each for model in MODELS for each in _of_model(model)]
    return [each for each in found if each.name.startswith(only)]


def _of_model(model: str) -> Iterator[Planned]:
    def layout(ranks: int, schedule: str, recompute: str = "never", replicas: int = 1) -> Planned:
        name = f"{model}_{ranks}r_{schedule}_{recompute}" + f"_x{replicas}" * (replicas > 1)
        words = (
            *MODELS[model],
            f"pipeline.stages={ranks // replicas}",
            f"pipeline.replicas={replicas}",
            "pipeline.microbatches=4",
            f"pipeline.schedule={schedule}",
            f"pipeline.recompute={recompute}",
        )
        return Planned(name, model, ranks, replicas, words)

    if model in _LARGE:
        yield layout(2, "one_f_one_b")
        yield layout(2, "gpipe", "except_last")
        yield layout(4, "one_f_one_b")
        return
    yield layout(1, "gpipe")
    yield layout(1, "gpipe", "always")
    for schedule in _PLAIN:
        yield layout(2, schedule)
    yield layout(2, "gpipe", "except_last")
    yield layout(2, "gpipe", "always")
    yield layout(2, "gpipe", replicas=2)
    yield layout(4, "one_f_one_b")
    yield layout(4, "gpipe", "except_last", replicas=2)
    # Every schedule is run with at least one model.
    others = {"mlp": _ON_TWO[:6], "gpt": _ON_TWO, "encoder": _ON_TWO[6:]}.get(model, ())
    for schedule in others:
        yield layout(2, schedule)
