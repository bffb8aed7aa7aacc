"""Our schedule tables in the runtime of torch.distributed.pipelining, and its tables in ours."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.models import build_layer
from gpipe_hpc.schedule import build, check, from_text, lower, to_text
from tests.support import batch, mean_square

SEED, WIDTH, M = 3, 6, 4
OPTIONS = {"hanayo": {"waves": 1}}
# All schedules with one copy of each stage. torch has no recomputation.
NAMES = [
    "gpipe",
    "one_f_one_b",
    "looped_bfs",
    "interleaved",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_half",
    "dualpipe_v",
    "hanayo",
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


SPECS = [LayerSpec(Block) for _ in range(4)]


def bare_table(name, microbatches=M):
    return build(name, ranks=2, microbatches=microbatches, **OPTIONS.get(name, {}))


def run_in_torch(table, path, form):
    """Train one step in torch's runtime; return losses and gradients of this rank's parameters."""
    rank = dist.get_rank()
    per_stage = len(SPECS) // table.num_stages
    stages = []
    for stage in table.placement.stages_of(rank):
        own = range(stage * per_stage, (stage + 1) * per_stage)
        layers = {str(i): build_layer(SPECS[i], index=i, seed=SEED) for i in own}
        module = nn.Sequential()
        for name, layer in layers.items():
            module.add_module(name, layer)
        stages.append(PipelineStage(module, stage, table.num_stages, torch.device("cpu")))
    path.write_text(to_text(table))
    runtime = theirs._PipelineScheduleRuntime(stages, M, mean_square)
    runtime._load_csv(str(path), format=form)
    inputs, targets = batch(width=WIDTH, dtype=torch.float64)
    losses = []
    holds = table.placement.stages_of(rank)
    runtime.step(
        *([inputs] if 0 in holds else []),
        target=targets if table.num_stages - 1 in holds else None,
        losses=losses,
    )
    gradients = {
        f"layers.{name}": p.grad for s in stages for name, p in s.submod.named_parameters()
    }
    return [loss.item() for loss in losses], gradients


def run_in_gpipe_hpc(table, world=None):
    pipe = Pipeline(
        SPECS,
        mean_square,
        stages=2,
        microbatches=M,
        schedule=table,
        recompute="never",
        partition="uniform",
        seed=SEED,
        world=world,
    )
    result = pipe.step(*batch(width=WIDTH, dtype=torch.float64))
    return result.microbatch_losses, {name: p.grad for name, p in pipe.named_parameters()}


def test_our_tables_give_same_gradients_in_torch_runtime(processes, tmp_path):
    """Runs bare tables and lowered tables.

    Torch's runtime has no tags, so it accepts only tables that post receives in the order of sends.
    """

    def body(rank):
        results = []
        for name in NAMES:
            bare = bare_table(name)
            forms = {"compute_only": bare, "compute_comms": lower(bare)}
            ours = run_in_gpipe_hpc(bare)
            for form, table in forms.items():
                theirs = run_in_torch(table, tmp_path / f"{name}_{form}_{rank}.csv", form)
                results.append((name, form, ours, theirs))
        return results

    ranks = processes(2, body, tmp_path)
    for per_rank in zip(*ranks, strict=True):
        seen = set()
        for name, form, (our_losses, our_gradients), (losses, gradients) in per_rank:
            assert our_gradients.keys() == gradients.keys(), (name, form)
            for key, gradient in gradients.items():
                difference = (our_gradients[key] - gradient).abs().max().item()
                assert difference < 1e-10 < gradient.abs().max(), (name, form, key)
            assert not losses or losses == pytest.approx(our_losses, abs=1e-12)
            seen |= gradients.keys()
        assert len(seen) == 4 * 4, "some gradients were not compared"


class TableOnlySchedule:
    """A torch schedule with only the attributes from which its table is computed."""

    def __new__(cls, kind, stages_per_rank, microbatches):
        schedule = object.__new__(kind)
        schedule.pp_group_size = 2
        schedule._n_microbatches = microbatches
        schedule._num_stages = schedule.num_stages = 2 * stages_per_rank
        schedule.n_local_stages = stages_per_rank
        schedule._stages = [None] * stages_per_rank
        schedule.number_of_rounds = max(1, microbatches // 2)
        schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
        return schedule


def torch_table_text(kind, stages_per_rank=2):
    schedule = TableOnlySchedule(kind, stages_per_rank, M)
    rows = []
    for rank in range(2):
        actions = schedule._calculate_single_rank_operations(rank)
        flat = [part for a in actions if a for part in (a.sub_actions or [a])]
        rows.append(",".join(map(str, flat)) + "\n")
    return "".join(rows)


@pytest.mark.parametrize(
    "kind",
    [
        theirs.ScheduleLoopedBFS,
        theirs.ScheduleInterleaved1F1B,
        theirs.ScheduleInterleavedZeroBubble,
        theirs.ScheduleZBVZeroBubble,
        theirs.ScheduleDualPipeV,
    ],
)
def test_torch_tables_train_in_our_runtime(kind):
    """The table is loaded from text, checked and lowered; gradients equal those of one process."""
    table = from_text(torch_table_text(kind), name=kind.__name__)
    check(table)
    model = nn.Sequential(*(build_layer(s, index=i, seed=SEED) for i, s in enumerate(SPECS)))
    inputs, targets = batch(width=WIDTH, dtype=torch.float64)
    mean_square(model(inputs), targets).backward()
    expected = {f"layers.{name}": p.grad for name, p in model.named_parameters()}
    compared = set()
    for _, gradients in run_on_threads(2, lambda world: run_in_gpipe_hpc(table, world)):
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).abs().max() < 1e-10
            compared.add(name)
    assert compared == expected.keys()


def test_lowered_torch_tables_train_in_our_runtime(processes, tmp_path):
    """The table contains torch's own sends and receives, as dumped by torch."""

    def body(rank):
        path = tmp_path / f"dumped{rank}.csv"
        stages = [
            PipelineStage(nn.Linear(1, 1), s, 4, torch.device("cpu")) for s in (rank, 3 - rank)
        ]
        theirs.ScheduleZBVZeroBubble(stages, M, mean_square)._dump_csv(str(path))
        text = path.read_text()
        assert "SEND_F" in text
        # Actions for FSDP sharding have no meaning here.
        lines = [
            ",".join(c for c in line.split(",") if "SHARD" not in c) for line in text.split("\n")
        ]
        table = from_text("\n".join(lines), name="torch's")
        check(table)
        assert table.is_lowered
        return run_in_gpipe_hpc(table), run_in_gpipe_hpc(bare_table("zb_v"))

    for theirs_run, ours in processes(2, body, tmp_path):
        assert theirs_run[0] == ours[0]
        assert theirs_run[1].keys() == ours[1].keys()
        for name, gradient in ours[1].items():
            assert (theirs_run[1][name] - gradient).abs().max() < 1e-12


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_torch_1f1b_table_is_refused(microbatches):
    """The table lacks the last rank's first forward; torch runs a hand-written loop instead."""
    schedule = object.__new__(theirs.Schedule1F1B)
    schedule.rank, schedule.pp_group_size, schedule._num_stages = 0, 2, 2
    schedule._n_microbatches = microbatches
    rows = schedule._get_pipeline_order()
    text = "".join(",".join("" if a is None else str(a) for a in rows[k]) + "\n" for k in range(2))
    assert "1F0" not in text
    with pytest.raises(ScheduleError, match=f"0F{microbatches} is missing"):
        check(from_text(text, name="torch's 1F1B"))
