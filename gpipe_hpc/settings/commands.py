"""Settings of commands other than train."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from gpipe_hpc.settings.fields import Choices, Level, Range, refuse
from gpipe_hpc.settings.spelling import BYTES, PRECISION, PRECISIONS, SCHEDULE


@dataclass
class CostsConfig:
    """Times of each op in a simulated schedule.

    A number, for a rank's share of the model, which its stages divide; or a list with the times of
    equal parts of the model. Drawings of a run.dir use its own.
    """

    forward: Any = 1.0
    """Forward pass."""

    backward: Any = None
    """Backward pass. null: input_gradient + weight_gradient."""

    input_gradient: Any = 1.0
    """The part of a backward pass that computes gradients of inputs."""

    weight_gradient: Any = 1.0
    """The part of a backward pass that computes gradients of weights."""

    recompute: Any = 1.0
    """Recomputation of a forward pass."""

    send: Any = 0.0
    """One transfer between stages; of a list, the time of the part ahead of the cut."""

    reduction: Any = 0.0
    """Sum of gradients over replicas."""

    gather: Any = 0.0
    """Gathering of parameters before use, with outer.shard=flat."""

    def check(self) -> None:
        """Refuse what is no time; raises ConfigError that names the setting."""
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
    """Say whether a value is a finite number of at least 0."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return 0 <= number < math.inf


@dataclass
class DrawConfig:
    """What ``python -m gpipe_hpc.draw`` makes."""

    format: Annotated[
        str, Choices("auto", "text", "svg", "png", "html", "trace", "table"), Level.EVERYDAY
    ] = "auto"
    """text, svg, png, html (one page with zoom), trace (for Perfetto) or table (all schedules).
    auto: by the ending of draw.out."""

    out: Annotated[str | None, Level.EVERYDAY] = None
    """File to write (.txt, .svg, .png, .html, .json, .md). null: text on standard output."""

    width: Annotated[int | None, Range(1, 100_000)] = None
    """Width in pixels (svg, png) or columns (text). null: as needed."""

    compare: Annotated[list[str], SCHEDULE, Level.EVERYDAY] = field(default_factory=list)
    """Further schedules of the same model to draw below on the same time scale, as [gpipe,zb_v];
    with a run.dir, with its measured costs."""

    buckets: Annotated[int, Range(1, 10_000)] = 1
    """Gradient buckets of a stage, each with a reduction of its own."""

    costs: CostsConfig = field(default_factory=CostsConfig)
    """Times of each op."""


@dataclass
class PlanConfig:
    """What ``python -m gpipe_hpc.plan`` plans for; exit code 3 if a rank needs too much memory."""

    search: Annotated[bool, Level.EVERYDAY] = False
    """Compare layouts instead of planning one. Settings on the command line stay, all others of the
    layout are chosen."""

    ranks: Annotated[int | None, Range(1, 65_536), Level.EVERYDAY] = None
    """Search: ranks of all pipelines. null: those of plan.links or pipeline.ranks, else the fewest
    that pipeline.memory_bytes allows."""

    hosts: Annotated[int | None, Range(1, 65_536), Level.CLUSTER] = None
    """Search: hosts with equal numbers of these ranks. null: those of plan.links, else one."""

    links: Annotated[str | None, Level.CLUSTER] = None
    """Search: file with the links of hosts and ranks, as python -m gpipe_hpc.preflight writes it.
    null: the settings below."""

    calibration: Annotated[str | None, Level.CLUSTER] = None
    """File with what a run measured, its calibration.yaml, in place of plan.costs; also links and
    overheads if plan.links, plan.prices and the link settings are not set."""

    prices: Annotated[str | None, Level.CLUSTER] = None
    """File with the overheads of a step, as preflight.steps=true writes it. null: none."""

    costs: Annotated[str | None, Choices("counted", "measured")] = None
    """Times of layers: counted (FLOPs over plan.flops_per_s) or measured (each layer runs here).
    null: counted in a search; otherwise no times unless plan.flops_per_s is set."""

    flops_per_s: Annotated[float | None, Range(1), Level.EVERYDAY] = None
    """FLOP/s that a rank reaches in practice, as 5e13. null: no times; a search measures this
    machine if ranks are CPUs."""

    memory_bytes_per_s: Annotated[float | None, Range(1)] = None
    """Search with plan.flops_per_s: bytes/s that a rank reads and writes, as 2e12. null: memory
    access is free."""

    precisions: Annotated[dict[str, Any], PRECISION] = field(default_factory=dict)
    """Search: precisions to compare, each with a rank's FLOP/s (null: measured here), as
    {float32: 6e13, bfloat16: 4e14}. {}: train.precision. They train with other numbers."""

    link_bytes_per_s: Annotated[float | None, Range(1), Level.CLUSTER] = None
    """Bytes/s from a rank to one of another host, as 12.5e6 for 100 Mbit/s. null: volumes are
    reported without times."""

    link_latency_s: Annotated[float, Range(0, 1000)] = 1e-5
    """Search: latency in seconds between hosts."""

    within_bytes_per_s: Annotated[float | None, Range(1)] = None
    """Search: bytes/s between ranks of one host. null: plan.link_bytes_per_s."""

    within_latency_s: Annotated[float, Range(0, 1000)] = 3e-6
    """Search: latency in seconds between ranks of one host."""

    host_copy_bytes_per_s: Annotated[float | None, Range(1)] = None
    """Bytes/s from an accelerator to its host, as 20e9. null: measured with pipeline.layout=auto;
    otherwise copies are free and a search does not offload."""

    layer_s: Annotated[float, Range(0, 1000)] = 1e-4
    """Search: shortest time in seconds of a layer's forward, and of each half of its backward."""

    shown: Annotated[int, Range(1, 1000)] = 10
    """Search: number of layouts to print."""

    @property
    def measures_layers(self) -> bool:
        """Say whether each layer is timed on this machine."""
        return self.costs == "measured"

    def check(self) -> None:
        """Refuse precisions that no run has, and those without a search; raises ConfigError."""
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
    """What is checked before a run, and what ``python -m gpipe_hpc.preflight`` measures.

    The command exits with 3 if ranks are not fit.
    """

    before_run: Annotated[bool, Level.CLUSTER] = True
    """Check free memory, shared memory, the run folder, open files and clocks before step 1 of
    train."""

    out: Annotated[str | None, Level.CLUSTER] = "links.yaml"
    """File for the measured links, as plan.links takes it. null: print the table only."""

    steps: Annotated[bool, Level.CLUSTER] = False
    """Also measure the overheads of a step (actions, sends, sums, optimizer, norms) and the memory
    of a process."""

    prices: Annotated[str, Level.CLUSTER] = "prices.yaml"
    """File for these overheads, as plan.prices takes it."""

    bytes: Annotated[Any, Range(1, 2**30), BYTES] = "4MB"
    """Size of the largest measured message; slow links get less."""


@dataclass
class VerifyConfig:
    """``python -m gpipe_hpc.verify``: this layout and one plain process; exits with 3 if they
    differ."""

    steps: Annotated[int, Range(1), Level.EVERYDAY] = 3
    """Optimizer steps to compare, at most train.steps."""


@dataclass
class ExportConfig:
    """How ``python -m gpipe_hpc.export`` writes weights."""

    out: Annotated[str | None, Level.EVERYDAY] = None
    """New folder to write. null: run.dir/exported/CHECKPOINT."""

    dtype: Annotated[str | None, Level.EVERYDAY] = None
    """Type of the weights in the files: float32, bfloat16, float16. null: as trained."""

    prefix: Annotated[str, Level.EVERYDAY] = "layers."
    """Prefix of a layer's number in names of weights. Empty: names of a plain nn.Sequential."""

    trust: Annotated[bool, Level.EVERYDAY] = False
    """Call a model._target_ of the run's config.yaml that is no function of gpipe_hpc.models. It
    can execute any code."""


@dataclass
class ReportConfig:
    """What ``python -m gpipe_hpc.report`` makes of run.dir."""

    format: Annotated[str, Choices("auto", "html", "markdown"), Level.EVERYDAY] = "auto"
    """html (one self-contained page) or markdown. auto: by the ending of report.out, else html."""

    out: Annotated[str | None, Level.EVERYDAY] = None
    """File to write. null: report.html or report.md in run.dir, or in the first of report.runs."""

    runs: Annotated[list[str], Level.EVERYDAY] = field(default_factory=list)
    """Folders of several runs to compare, instead of run.dir: [A,B]."""

    def check(self, run_dir: str | None) -> None:
        """Refuse no run at all, and two ways to name runs; raises ConfigError."""
        if run_dir is None and not self.runs:
            raise refuse(
                "run.dir", "the folder of a run", None, "set it, or report.runs=[A,B] for several"
            )
        if run_dir is not None and self.runs:
            raise refuse("report.runs", "[] with run.dir", self.runs, "set only one of them")


@dataclass
class BenchConfig:
    """Combinations that ``python -m gpipe_hpc.bench`` measures.

    Each combination of these lists is one point; an empty list means the run's own setting.
    """

    workloads: Annotated[list[str], Level.EVERYDAY] = field(default_factory=lambda: ["steps"])
    """steps: training steps of your model."""

    ranks: Annotated[list[int], Level.EVERYDAY] = field(default_factory=list)
    """Numbers of processes, all on this machine. []: pipeline.stages x pipeline.replicas."""

    threads: list[int] = field(default_factory=lambda: [1])
    """CPU threads of a rank."""

    batch_sizes: Annotated[list[int], Level.EVERYDAY] = field(default_factory=list)
    """Samples of the global batch. []: train.batch_size."""

    microbatches: Annotated[list[int], Level.EVERYDAY] = field(default_factory=list)
    """Micro-batches of a replica. []: pipeline.microbatches."""

    backends: list[str] = field(default_factory=list)
    """gloo, mpi, nccl, xccl. []: comm.backend."""

    steps: Annotated[int, Range(1), Level.EVERYDAY] = 5
    """Measured steps of a combination, after two that are not measured."""

    limit_s: Annotated[float, Range(1)] = 600.0
    """Seconds that a combination may take."""

    out: Annotated[str | None, Level.EVERYDAY] = None
    """Folder for bench.json, bench.md and bench.svg. null: print the table only."""

    def check(self) -> None:
        """Refuse workloads that there are not; raises ConfigError."""
        for name in self.workloads or [""]:
            remedy = "leave it out"
            if name == "collectives":
                remedy = (
                    "algorithms of collectives are timed by python -m "
                    "experiments.outer.collectives measure, in a checkout of the repository"
                )
            if name != "steps":
                raise refuse("bench.workloads", "[steps]", f"[{name}]", remedy)
