"""Settings of the commands draw, plan, preflight, verify, export, report and bench."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from gpipe_hpc.settings.fields import (
    PRECISIONS,
    Choices,
    Level,
    Range,
    canonical_precision,
    named_schedule,
    refuse,
)


@dataclass
class CostsConfig:
    """Times of the operations in a simulated schedule, in any unit.

    A number is the time for a rank's share of the model, which its stages divide. A list contains
    the times of equal parts of the model. Drawings of a run.dir use the measured times of the run.
    """

    forward: Any = 1.0
    """Time of a forward pass."""

    backward: Any = None
    """Time of a backward pass. null: input_gradient + weight_gradient."""

    input_gradient: Any = 1.0
    """Time of the part of a backward pass that computes gradients of inputs."""

    weight_gradient: Any = 1.0
    """Time of the part of a backward pass that computes gradients of weights."""

    recompute: Any = 1.0
    """Time of the recomputation of a forward pass."""

    send: Any = 0.0
    """Time of a transfer between two stages. In a list: of the part before the stage boundary."""

    reduction: Any = 0.0
    """Time of the all-reduce of a stage's gradients over replicas."""

    gather: Any = 0.0
    """Time of the all-gather of a stage's parameters before use, with outer.shard=flat."""

    def check(self) -> None:
        """Raise ConfigError for a value that is not a time."""
        for name, cost in vars(self).items():
            numbers = cost if isinstance(cost, list) else [cost]
            is_optional = name == "backward" and cost is None
            if not is_optional and not (numbers and all(map(is_time, numbers))):
                raise refuse(
                    f"draw.costs.{name}",
                    "a time of 0 or more, or a list of times",
                    cost,
                    f"write it as draw.costs.{name}=1.5 or [1,1.5]",
                )


def is_time(number: object) -> bool:
    """Return whether a value is a finite number of at least 0."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return 0 <= number < math.inf


@dataclass
class DrawConfig:
    """Output of ``python -m gpipe_hpc.draw``."""

    format: Annotated[
        str, Choices("auto", "text", "svg", "png", "html", "trace", "table"), Level.EVERYDAY
    ] = "auto"
    """Output format: text, svg, png, html (one page with zoom), trace (for Perfetto) or table
    (compare all schedules). auto: by the file name extension of draw.out."""

    out: Annotated[str | None, Level.EVERYDAY] = None
    """Output file (.txt, .svg, .png, .html, .json, .md). null: print text to standard output."""

    width: Annotated[int | None, Range(1, 100_000)] = None
    """Width in pixels (svg, png) or columns (text). null: as wide as needed."""

    compare: Annotated[list[str], named_schedule, Level.EVERYDAY] = field(default_factory=list)
    """Other schedules of the same model, drawn below on the same time scale, for example
    [gpipe,zb_v]. With run.dir, they are simulated with the measured times of that run."""

    buckets: Annotated[int, Range(1, 10_000)] = 1
    """Number of gradient buckets of a stage; each is all-reduced separately."""

    costs: CostsConfig = field(default_factory=CostsConfig)
    """Times of the operations."""


@dataclass
class PlanConfig:
    """Settings of ``python -m gpipe_hpc.plan``; exit code 3 if a rank needs too much memory."""

    search: Annotated[bool, Level.EVERYDAY] = False
    """Search for the fastest layout instead of planning the given one. Settings of the layout on
    the command line are kept; the search chooses all others."""

    ranks: Annotated[int | None, Range(1, 65_536), Level.EVERYDAY] = None
    """Search: number of ranks of all pipelines. null: from plan.links or pipeline.ranks; otherwise
    the smallest number that pipeline.memory_bytes allows."""

    hosts: Annotated[int | None, Range(1, 65_536), Level.CLUSTER] = None
    """Search: number of hosts, each with the same number of ranks. null: from plan.links, or
    one."""

    links: Annotated[str | None, Level.CLUSTER] = None
    """Search: file with the latency and bandwidth between ranks and hosts, as written by python -m
    gpipe_hpc.preflight. null: use plan.link_* and plan.within_*."""

    calibration: Annotated[str | None, Level.CLUSTER] = None
    """File with the layer times that a run measured (calibration.yaml in its folder), used instead
    of plan.costs. Its links and overheads are used too if plan.links, plan.prices, plan.link_* and
    plan.within_* are not set. null: none."""

    prices: Annotated[str | None, Level.CLUSTER] = None
    """File with the overheads of a step, as written by preflight.steps=true. null: no overheads."""

    costs: Annotated[str | None, Choices("counted", "measured")] = None
    """Source of layer times: counted (FLOPs / plan.flops_per_s) or measured (each layer is run on
    this machine). null: counted in a search; otherwise no times unless plan.flops_per_s is set."""

    flops_per_s: Annotated[float | None, Range(1), Level.EVERYDAY] = None
    """FLOP/s that a rank reaches in practice, for example 5e13. null: no times; a search for CPU
    ranks measures this machine."""

    memory_bytes_per_s: Annotated[float | None, Range(1)] = None
    """Search with plan.flops_per_s: memory bandwidth of a rank in bytes/s, for example 2e12. null:
    memory accesses take no time."""

    precisions: Annotated[dict[str, Any], canonical_precision] = field(default_factory=dict)
    """Search: precisions to compare, each with the FLOP/s of a rank (null: measured on this
    machine), for example {float32: 6e13, bfloat16: 4e14}. They give different training results. {}:
    only train.precision."""

    link_bytes_per_s: Annotated[float | None, Range(1), Level.CLUSTER] = None
    """Bandwidth in bytes/s between ranks on different hosts, for example 12.5e6 for 100 Mbit/s.
    null: traffic is reported without times."""

    link_latency_s: Annotated[float, Range(0, 1000)] = 1e-5
    """Search: latency in seconds of a message between hosts."""

    within_bytes_per_s: Annotated[float | None, Range(1)] = None
    """Search: bandwidth in bytes/s between ranks of one host. null: plan.link_bytes_per_s."""

    within_latency_s: Annotated[float, Range(0, 1000)] = 3e-6
    """Search: latency in seconds of a message between ranks of one host."""

    host_copy_bytes_per_s: Annotated[float | None, Range(1)] = None
    """Bandwidth in bytes/s of copies from an accelerator to its host, for example 20e9. null:
    measured with pipeline.layout=auto; otherwise copies take no time and a search does not try
    pipeline.offload."""

    layer_s: Annotated[float, Range(0, 1000)] = 1e-4
    """Search: shortest time in seconds of a layer's forward pass and of each half of its backward
    pass; stands for the launch overhead of its kernels."""

    shown: Annotated[int, Range(1, 1000)] = 10
    """Search: number of layouts in the printed table."""

    @property
    def measures_layers(self) -> bool:
        """Return whether each layer is timed on this machine."""
        return self.costs == "measured"

    def check(self) -> None:
        """Raise ConfigError for unknown precisions, and for precisions without a search."""
        known = PRECISIONS.names
        for name, rate in self.precisions.items():
            is_rate = isinstance(rate, int | float) and not isinstance(rate, bool) and rate >= 1
            if name not in known or not (rate is None or is_rate):
                raise refuse(
                    "plan.precisions",
                    f"{', '.join(known)}, each with the FLOP/s of a rank or null",
                    self.precisions,
                    "write it as {float32: 6e13, bfloat16: 4e14}",
                )
        if self.precisions and not self.search:
            raise refuse(
                "plan.precisions",
                "{} without a search",
                self.precisions,
                "set plan.search=true, or only train.precision",
            )


@dataclass
class PreflightConfig:
    """Checks before a run, and measurements of ``python -m gpipe_hpc.preflight``.

    The command exits with 3 if a check of the ranks fails.
    """

    before_run: Annotated[bool, Level.CLUSTER] = True
    """Before step 1 of train, check free memory, shared memory, the run folder, the limit of open
    files and the clocks."""

    out: Annotated[str | None, Level.CLUSTER] = "links.yaml"
    """Output file for the measured links, for plan.links. null: print the table only."""

    steps: Annotated[bool, Level.CLUSTER] = False
    """Also measure the overheads of a step (actions, sends, all-reduces, optimizer, norms) and the
    memory of a process, and write them as prices.yaml next to preflight.out, for plan.prices."""


@dataclass
class VerifyConfig:
    """Settings of ``python -m gpipe_hpc.verify``, which compares a layout with one plain
    process."""

    steps: Annotated[int, Range(1), Level.EVERYDAY] = 3
    """Number of optimizer steps to compare; at most train.steps."""


@dataclass
class ExportConfig:
    """Output of ``python -m gpipe_hpc.export``, which writes weights as safetensors."""

    out: Annotated[str | None, Level.EVERYDAY] = None
    """New folder for the files. null: run.dir/exported/CHECKPOINT."""

    dtype: Annotated[str | None, Level.EVERYDAY] = None
    """dtype of the weights in the files: float32, bfloat16 or float16. null: the dtype of
    training."""

    prefix: Annotated[str, Level.EVERYDAY] = "layers."
    """Prefix of the layer number in the names of weights. Empty: names as in a plain
    nn.Sequential."""

    trust: Annotated[bool, Level.EVERYDAY] = False
    """Trust the run's config.yaml: call its model._target_ even if it is not a function of
    gpipe_hpc.models. It can execute any code."""


@dataclass
class ReportConfig:
    """Output of ``python -m gpipe_hpc.report``, a report on run.dir."""

    out: Annotated[str | None, Level.EVERYDAY] = None
    """File to write: Markdown if its name ends in .md, otherwise one self-contained HTML page.
    null: report.html in run.dir, or in the first of report.runs."""

    runs: Annotated[list[str], Level.EVERYDAY] = field(default_factory=list)
    """Run folders to compare in one report, instead of run.dir, for example [runs/a,runs/b]."""

    def check(self, run_dir: str | None) -> None:
        """Raise ConfigError unless either run.dir or report.runs is set."""
        if run_dir is None and not self.runs:
            raise refuse(
                "run.dir", "the folder of a run", None, "set it, or report.runs=[A,B] for several"
            )
        if run_dir is not None and self.runs:
            raise refuse("report.runs", "[] with run.dir", self.runs, "set only one of them")


@dataclass
class BenchConfig:
    """Settings of ``python -m gpipe_hpc.bench``, which measures each combination of these lists.

    An empty list stands for the value of the setting that training uses.
    """

    workloads: Annotated[list[str], Level.EVERYDAY] = field(default_factory=lambda: ["steps"])
    """Workloads to measure; steps (training steps of your model) is the only one."""

    ranks: Annotated[list[int], Range(1), Level.EVERYDAY] = field(default_factory=list)
    """Numbers of ranks, all on this machine. []: pipeline.stages x pipeline.replicas."""

    threads: Annotated[list[int], Range(1)] = field(default_factory=lambda: [1])
    """Numbers of CPU threads of a rank."""

    batch_sizes: Annotated[list[int], Range(1), Level.EVERYDAY] = field(default_factory=list)
    """Numbers of samples in the global batch. []: train.batch_size."""

    microbatches: Annotated[list[int], Range(1), Level.EVERYDAY] = field(default_factory=list)
    """Numbers of micro-batches of a replica. []: pipeline.microbatches."""

    backends: list[str] = field(default_factory=list)
    """Backends: gloo, mpi, nccl, xccl. []: comm.backend."""

    steps: Annotated[int, Range(1), Level.EVERYDAY] = 5
    """Measured steps of a combination, after two warm-up steps."""

    out: Annotated[str | None, Level.EVERYDAY] = None
    """Output folder for bench.json, bench.md and bench.svg. null: print the table only."""

    def check(self) -> None:
        """Raise ConfigError for unknown workloads."""
        for name in self.workloads or [""]:
            remedy = "leave it out"
            if name == "collectives":
                remedy = (
                    "to time collectives, run python -m experiments.outer.collectives measure in a "
                    "checkout of the repository"
                )
            if name != "steps":
                raise refuse("bench.workloads", "[steps]", f"[{name}]", remedy)
