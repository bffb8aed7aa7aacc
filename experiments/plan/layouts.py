"""The layouts to plan and run: on CPUs with 1, 2 and 4 ranks, and on one GPU."""

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
_LARGE: Final = ("gpt2",)  # of these a few layouts, for what they say of memory
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


# Micro-batches that keep a large device busy: a step that waits for the host shows the host.
_ON_ACCELERATOR: Final = {
    "gpt2_medium": (
        "model=gpt2_medium",
        "data=synthetic",
        "data.seq_len=1024",
        "data.vocab_size=50257",
        "train.batch_size=64",
    ),
    "bert48": (
        "model=bert48",
        "data=synthetic",
        "data.objective=masked",
        "data.seq_len=512",
        "data.vocab_size=30521",
        "train.batch_size=128",
    ),
    "resnet50": (
        "model=resnet50",
        "data=synthetic_images",
        "data.height=128",
        "data.width=128",
        "data.num_classes=1000",
        "train.batch_size=512",
    ),
}
_HOST_COPIES: Final = "plan.host_copy_bytes_per_s=55e9"  # as experiments.gpu measured on an H200


class Planned(NamedTuple):
    """A layout: its name, its model, how many ranks and replicas, and its settings.

    `precision`: in which it computes. `beside`: settings of its plans alone.
    """

    name: str
    model: str
    ranks: int
    replicas: int
    words: tuple[str, ...]
    precision: str = "float32"
    beside: tuple[str, ...] = ()


def layouts(only: str = "", device: str = "cpu") -> list[Planned]:
    """Return the layouts with a given name prefix, for CPUs or one accelerator."""
    if device == "cpu":
        found = [each for model in MODELS for each in _of_model(model)]
    else:
        found = list(_of_accelerator())
    return [each for each in found if each.name.startswith(only)]


def _of_accelerator() -> Iterator[Planned]:
    def layout(
        model: str,
        schedule: str,
        recompute: str,
        *more: str,
        precision: str = "bfloat16",
        beside: tuple[str, ...] = (),
    ) -> Planned:
        told = [word.partition("=")[0].rpartition(".")[2] for word in more]
        name = "_".join((model, schedule, recompute, *told, *[precision] * (precision[0] == "f")))
        words = (
            *_ON_ACCELERATOR[model],
            "pipeline.stages=1",
            "pipeline.microbatches=4",
            f"pipeline.schedule={schedule}",
            f"pipeline.recompute={recompute}",
            f"train.precision={precision}",
            *more,
        )
        return Planned(name, model, 1, 1, words, precision, beside)

    for model in _ON_ACCELERATOR:
        yield layout(model, "one_f_one_b", "never")
        yield layout(model, "one_f_one_b", "always")
    for model in ("gpt2_medium", "resnet50"):
        yield layout(model, "gpipe", "never", "pipeline.offload=true", beside=(_HOST_COPIES,))
    yield layout("gpt2_medium", "interleaved", "never", "pipeline.options.stages_per_rank=4")
    yield layout("gpt2_medium", "gpipe", "except_last")
    yield layout("resnet50", "one_f_one_b", "never", precision="float32")


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
    # Every schedule is run with some model; two models share the rest between them.
    others = {"mlp": _ON_TWO[:6], "gpt": _ON_TWO, "encoder": _ON_TWO[6:]}.get(model, ())
    for schedule in others:
        yield layout(2, schedule)
