"""Huang et al., GPipe, NeurIPS 2019, and torchgpipe's runs of the same (Kim et al., 2020).

Legend: K accelerators, M micro-batches, F, B and R the time of a stage's forward, backward and
recomputation; AmoebaNet-D (L, D), Transformer-L.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import torch

from experiments.papers import largest
from experiments.papers.table import Figure, Paper, Table, counted, timed
from gpipe_hpc.models import count_parameters
from gpipe_hpc.models.zoo.names import build_model
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.cutting.minimax import minimax
from gpipe_hpc.schedule import Costs, Memory, build, peak_memory

BYTES_A_PARAMETER: Final = 12  # weight, gradient, RMSProp's state


def step_times() -> Table:
    """Section 2.3: the bubble, and the time that recomputation adds."""
    figures: list[Figure] = []
    for k, m in ((4, 8), (8, 32), (16, 64)):
        what = f"K={k}, M={m}"
        plain = timed("gpipe", k, m, Costs(forward=1, backward=2))
        figures.append(Figure(f"{what}: (M + K - 1)(F + B)", 3 * (m + k - 1), plain.makespan))
        figures.append(
            Figure(f"{what}: (K - 1) / (M + K - 1)", (k - 1) / (m + k - 1), plain.bubble)
        )
        costs = Costs(forward=1, backward=2, recompute=1)
        early = timed("gpipe", k, m, costs, recompute="always").makespan
        what = f"{what}, R = F, recomputed ahead of the gradient: M (F + R + B) + (K - 1)(F + B)"
        figures.append(Figure(what, 4 * m + 3 * (k - 1), early))
    late = timed("gpipe", 8, 32, Costs(forward=1, backward=3)).makespan
    figures.append(Figure("K=8, M=32, recomputed when the gradient is there", 156, late))
    spared = timed("gpipe", 8, 32, Costs(forward=1, backward=2, recompute=1), "except_last")
    figures.append(Figure("K=8, M=32, except_last", 148, spared.makespan))
    return Table(
        "Section 2.3: time of a step",
        "the bubble (K - 1) / (M + K - 1); recomputation starts before the gradient arrives",
        "F = R = 1, B = 2, equal stages",
        tuple(figures),
    )


def activations() -> Table:
    """Section 2.3: O(N + L / K x N / M)."""
    figures: list[Figure] = []
    for k, m in ((4, 8), (8, 32)):
        again = build("gpipe", ranks=k, microbatches=m, recompute="always")
        most = max(peak_memory(again, Memory(forward=10, boundary=1)))
        figures.append(Figure(f"K={k}, M={m}: recomputed", m + 9, most))
        most = max(peak_memory(build("gpipe", ranks=k, microbatches=m), Memory(forward=10)))
        figures.append(Figure(f"K={k}, M={m}: kept", 10 * m, most))
    return Table(
        "Section 2.3: peak of activations",
        "M inputs of the stage and the activations of one micro-batch; without recomputation, all "
        "activations of M micro-batches",
        "a micro-batch keeps 1 unit at the boundary of a stage and 10 in all",
        tuple(figures),
    )


class Amoeba(NamedTuple):
    """A column of table 1: figures of GPipe and of torchgpipe for the same model."""

    layers: int
    filters: int
    printed: str
    unit: float
    gpipe: float
    gpipe_memory_gb: float
    model_memory_gib: str


AMOEBAS: Final = (
    Amoeba(18, 208, "81.5", 1e6, 82e6, 1.05, "0.91"),
    Amoeba(18, 416, "319.0", 1e6, 318e6, 3.8, "3.57"),
    Amoeba(18, 544, "542.7", 1e6, 542e6, 6.45, "6.07"),
    Amoeba(36, 544, "1.06", 1e9, 1.05e9, 12.53, "11.80"),
    Amoeba(72, 512, "1.84", 1e9, 1.8e9, 24.62, "20.62"),
)
# U-Net (B, C) of torchgpipe: parameters as printed, in units.
UNETS: Final = (
    (6, 72, "362.2", 1e6),
    (11, 128, "2.21", 1e9),
    (24, 128, "4.99", 1e9),
    (24, 160, "7.80", 1e9),
    (48, 160, "15.82", 1e9),
)
# Transformer-L of table 1: layers, parameters as printed, in units, memory of parameters in GiB
# (of L = 3 the figure in the row of activations: the two are printed the wrong way round).
TRANSFORMERS: Final = (
    (3, "282.2", 1e6, 3.15),
    (13, "785.8", 1e6, 8.8),
    (103, "5.3", 1e9, 59.5),
    (415, "21.0", 1e9, 235.1),
    (1663, "83.9", 1e9, 937.9),
)


@cache
def _amoeba(layers: int, filters: int) -> int:
    return count_parameters(build_model("amoebanet_d", num_layers=layers, num_filters=filters))


@cache
def _transformer(layers: int) -> int:
    """Return the parameters of Transformer-L, extrapolated from the first two sizes."""
    one, two = (
        count_parameters(build_model("transformer_l", num_layers=number)) for number in (1, 2)
    )
    return one + (layers - 1) * (two - one)


def images() -> Table:
    """Table 1, and torchgpipe's memory table: parameters of the image models."""
    figures: list[Figure] = []
    for each in AMOEBAS:
        number = _amoeba(each.layers, each.filters)
        name = f"AmoebaNet-D ({each.layers}, {each.filters})"
        figures.append(counted(f"{name}: parameters", each.printed, number, each.unit))
        memory = number * BYTES_A_PARAMETER / 2**30
        figures.append(counted(f"{name}: model memory, GiB", each.model_memory_gib, memory))
    for blocks, channels, printed, unit in UNETS:
        model = build_model("unet", num_convs=blocks, base_channels=channels)
        what = f"U-Net ({blocks}, {channels}): parameters"
        figures.append(counted(what, printed, count_parameters(model), unit))
    return Table(
        "torchgpipe: parameters and memory of AmoebaNet-D and U-Net",
        "the models of torchgpipe; 12 bytes per parameter",
        "nothing; ours are rounded to the printed digits",
        tuple(figures),
    )


def transformers() -> Table:
    """Table 1: parameters of Transformer-L."""
    figures = [
        counted(f"Transformer-{layers}: parameters", printed, _transformer(layers), unit)
        for layers, printed, unit, _ in TRANSFORMERS
    ]
    return Table(
        "Table 1: parameters of Transformer-L",
        "width 2,048, MLP 8,192, 32 heads, vocabulary 32,000",
        "embedding and head are two matrices; L layers are extrapolated from the first two",
        tuple(figures),
    )


def table_1() -> Table:
    """Table 1: printed figures that contradict the sizes."""
    figures: list[Figure] = []
    for each in AMOEBAS:
        name = f"AmoebaNet-D ({each.layers}, {each.filters})"
        number = float(_amoeba(each.layers, each.filters))
        figures.append(Figure(f"{name}: millions of parameters", each.gpipe / 1e6, number / 1e6))
        held = number * BYTES_A_PARAMETER / 1e9
        figures.append(Figure(f"{name}: parameters, GB", each.gpipe_memory_gb, held))
    for layers, _, _, memory_gib in TRANSFORMERS:
        held = _transformer(layers) * BYTES_A_PARAMETER / 2**30
        figures.append(Figure(f"Transformer-{layers}: parameters, GiB", memory_gib, held))
    return Table(
        "Table 1: parameters and their memory",
        "12 bytes per parameter",
        "AmoebaNet in GB, the Transformer in GiB, which fits the printed figures best",
        tuple(figures),
        "for Transformer-3 the paper swaps the memory of parameters and of activations. For "
        "AmoebaNet-D (72, 512) its two figures disagree: 24.62 GB are 2.05 billion parameters of "
        "12 bytes, and it prints 1.8 billion. Peaks of activations are not compared, because the "
        "paper does not state what accelerators keep of a layer",
    )


# Table 2 on TPUs and table 3 on P100s: (K, M) -> throughput, relative to the first.
TABLE_2: Final = {
    (2, 1): 1.0,
    (4, 1): 1.07,
    (8, 1): 1.3,
    (2, 4): 1.7,
    (4, 4): 3.2,
    (8, 4): 4.8,
    (2, 32): 1.8,
    (4, 32): 3.4,
    (8, 32): 6.3,
}
TABLE_3: Final = {(2, 32): 1.0, (4, 32): 1.8, (8, 32): 3.3}


def _throughput(work: Sequence[float], balance: Sequence[int], m: int, recompute: str) -> float:
    """Return the batches of the given work per unit of time; a forward is a third of the work."""
    ends = [0, *accumulate(balance)]
    stages = [sum(work[first:end]) / m for first, end in pairwise(ends)]
    forward, backward = [each / 3 for each in stages], [2 * each / 3 for each in stages]
    costs = Costs(forward=forward, backward=backward, recompute=forward)
    return 1 / timed("gpipe", len(balance), m, costs, recompute=recompute).makespan


@cache
def _transformer_work(layers: int) -> tuple[float, ...]:
    """Return the FLOPs of the layers of Transformer-L for one sequence."""
    tokens = torch.empty((1, 1024), dtype=torch.long, device="meta")
    model = count_model(build_model("transformer_l", num_layers=layers), tokens)
    return tuple(float(each.flops) for each in model.layers)


def _relative(
    name: str, printed: dict[tuple[int, int], float], layers: int, ungiven: frozenset[int]
) -> list[Figure]:
    work = _transformer_work(layers)
    found = {(k, m): _throughput(work, minimax(work, k), m, "always") for k, m in printed}
    base = next(iter(found.values()))
    return [
        Figure(f"{name}, K={k}, M={m}", paper, found[k, m] / base, m not in ungiven)
        for (k, m), paper in list(printed.items())[1:]
    ]


def table_2() -> Table:
    """Table 2, the Transformer."""
    return Table(
        "Table 2: throughput of Transformer-48 on TPUs, relative to K=2, M=1",
        "the model, K and M; everything is recomputed, and R starts before the gradient arrives",
        "the time of a layer is proportional to its counted FLOPs, B = 2F; the partition with the "
        "smallest maximum; free transfers. No rate is needed: all is relative to the first figure",
        tuple(_relative("Transformer-48", TABLE_2, 48, frozenset({4}))),
        "M=4 is not reproducible: 3.2 and 4.8 are above the ideal pipeline's 2.29 and 2.91: the "
        "paper adjusted the batch of each cell, also for K=8, M=1. For K=8, M=32 our largest "
        "stage has 7.5 % more FLOPs than the mean, because the head needs as much as three layers "
        "of attention; with even stages ours would be 4 % below the paper's figure. AmoebaNet's "
        "rows are left out, because its partitions and kernel times on a TPU are not given; "
        "torchgpipe's runs of it are below",
    )


def table_3() -> Table:
    """Table 3, the Transformer."""
    return Table(
        "Table 3: throughput of Transformer-24 on P100s over PCIe, M=32, relative to K=2",
        "as for table 2",
        "as for table 2",
        tuple(_relative("Transformer-24", TABLE_3, 24, frozenset())),
        "AmoebaNet's row is left out, as in table 2",
    )


class Run(NamedTuple):
    """A run of torchgpipe: images per second, layers of each stage, micro-batches."""

    name: str
    images_per_s: float
    balance: tuple[int, ...]
    microbatches: int


RUNS: Final = (
    Run("n2m1", 26.733, (7, 17), 1),
    Run("n2m4", 41.133, (9, 15), 4),
    Run("n2m32", 47.386, (9, 15), 32),
    Run("n4m1", 26.827, (3, 4, 5, 12), 1),
    Run("n4m4", 44.543, (3, 6, 7, 8), 4),
    Run("n4m32", 72.412, (3, 6, 7, 8), 32),
    Run("n8m1", 24.918, (2, 2, 2, 2, 2, 3, 4, 7), 1),
    Run("n8m4", 70.065, (2, 2, 2, 3, 3, 4, 4, 4), 4),
    Run("n8m32", 132.413, (2, 2, 2, 3, 3, 4, 4, 4), 32),
)
_FITTED: Final = "n2m32"


def _speedups(share: float) -> dict[str, float]:
    """Return throughputs relative to the first run; `share` of the time scales with FLOPs."""
    images = torch.empty((1, 3, 224, 224), device="meta")
    flops, held = _amoeba_work(images.shape)
    work = [
        share * own / sum(flops) + (1 - share) * moved / sum(held)
        for own, moved in zip(flops, held, strict=True)
    ]
    found = {
        run.name: _throughput(
            work,
            run.balance,
            run.microbatches,
            "always" if run.microbatches == 1 else "except_last",
        )
        for run in RUNS
    }
    return {name: each / found[RUNS[0].name] for name, each in found.items()}


@cache
def _amoeba_work(shape: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Return FLOPs and activation bytes of the layers of AmoebaNet-D (18, 256)."""
    layers = build_model("amoebanet_d", num_layers=18, num_filters=256)
    model = count_model(layers, torch.empty(shape, device="meta"))
    flops = [float(each.flops) for each in model.layers]
    return flops, [float(each.activation_bytes) for each in model.layers]


def torchgpipe() -> Table:
    """torchgpipe's runs of GPipe's table 2."""
    paper = {run.name: run.images_per_s / RUNS[0].images_per_s for run in RUNS}
    tried = [_speedups(step / 20) for step in range(21)]
    best = min(tried, key=lambda each: abs(each[_FITTED] - paper[_FITTED]))
    share = tried.index(best) / 20
    figures = [
        Figure(run.name, paper[run.name], best[run.name], run.microbatches == 32)
        for run in RUNS[1:]
        if run.name != _FITTED
    ]
    return Table(
        "torchgpipe: throughput of AmoebaNet-D (18, 256) on Tesla P40s, relative to n2m1",
        "K (n) and M (m), the layers of each stage, what is recomputed (m1: all, else except_last)",
        f"the time of a layer is proportional to its FLOPs ({100 * share:.0f} %) and to the bytes "
        f"that it keeps (the rest). The share is the best of 21 for {_FITTED}, which is "
        f"therefore not compared. B = 2F; free transfers",
        tuple(figures),
        "m1 and m4 have larger micro-batches (64 to 196 images, m32 36 to 40), and the effect on "
        "kernels was not published",
    )


PAPER: Final = Paper(
    "gpipe",
    "GPipe: Huang et al., NeurIPS 2019, and torchgpipe: Kim et al., 2020",
    formulas=(step_times, activations),
    counts=(images, transformers, largest.amoebas),
    simulated=(table_1, largest.transformers, table_2, table_3, torchgpipe),
)
