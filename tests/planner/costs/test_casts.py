"""Weights in a lower precision count once a step, against what a run and autocast really hold."""

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gpipe_hpc import Pipeline
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine import precision as engine_precision
from gpipe_hpc.engine.precision import casting, keeping_casts
from gpipe_hpc.models import LayerSpec, build_gpt, build_model, token_cross_entropy
from gpipe_hpc.planner.budget.fitting import choose_recompute
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.forecast import forecast
from gpipe_hpc.planner.report.tables import Assumptions, rank_table
from gpipe_hpc.schedule import build, lower
from gpipe_hpc.units import bytes_text

pytestmark = pytest.mark.skipif(
    not engine_precision.casts_keep_their_graph(), reason="this torch casts for each graph"
)

CPU = HostDevice()
LOWER = ["bfloat16", "float16"]


class Living(TorchDispatchMode):
    """Note the storage of every tensor that is made, and tell which of them live."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []
        # By address, which is not given to another while the reference is there.
        self.seen: dict[int, StorageWeakRef] = {}

    def see(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        is_new = storage._cdata not in self.seen
        if is_new:
            self.seen[storage._cdata] = StorageWeakRef(storage)
        return is_new

    def note(self, tensor: Tensor) -> None:
        if self.see(tensor):
            storage = tensor.untyped_storage()
            self.made.append((self.seen[storage._cdata], storage.nbytes()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tree_map_only(Tensor, self.see, args)
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.note, result)
        return result

    def nbytes(self) -> int:
        return sum(nbytes for storage, nbytes in self.made if not storage.expired())


def counted(layers, given: Tensor, precision: str, **settings):
    return count_model(
        layers, torch.empty_like(given, device="meta"), precision=precision, **settings
    )


def casts_of(model) -> int:
    return sum(weight.cast_bytes for weight in model.weights(range(len(model.layers))))


class Frozen(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.requires_grad_(False)


class Transposed(nn.Linear):
    """Uses a view of its weight, which autocast casts anew each time."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class OwnCast(nn.Linear):
    """Casts by itself, which nobody remembers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16() @ self.weight.bfloat16()


WIDTH = 8
KINDS = [nn.Linear, Frozen, Transposed, Twice, OwnCast]
LAYERS = [LayerSpec(kind, *[WIDTH] * (2 if kind is not Frozen else 1)) for kind in KINDS]
MATRIX, BIAS = 2 * WIDTH * WIDTH, 2 * WIDTH


@pytest.mark.parametrize("precision", LOWER)
@pytest.mark.parametrize(
    "layer, expected",
    list(zip(LAYERS, [MATRIX + BIAS, 0, 0, MATRIX + BIAS, 0], strict=True)),
    ids=[kind.__name__ for kind in KINDS],
)
def test_casts_are_those_that_outlive_a_forward(layer, expected, precision):
    module, given = layer.build(), torch.rand(3, WIDTH)
    with Living() as living, keeping_casts(precision, CPU):
        for _ in range(2):
            with casting(precision, CPU):
                module(given)
        held = living.nbytes()
    model = counted([layer], given, precision)
    assert casts_of(model) == held == expected


def test_casts_that_are_kept_are_no_activations():
    # The data in the lower precision, and nothing else: a weight's casts are counted apart.
    given = torch.rand(3, WIDTH)
    for layer, own in zip(LAYERS, [0, None, 0, 2 * 3 * WIDTH, 0], strict=True):
        if own is not None:
            kept = counted([layer], given, "bfloat16").layers[0].activation_bytes
            assert kept == 2 * 3 * WIDTH + own, layer
    behind = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Frozen, WIDTH)]
    frozen = counted(behind, given, "bfloat16").layers[1]
    assert frozen.kept.inside == MATRIX and frozen.weights[0].cast_bytes == 0


def test_nothing_is_cast_in_float32_or_where_graphs_move_to_the_host():
    given = torch.rand(3, WIDTH)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH)] * 2
    plain, apart = (
        counted(layers, given, "float32"),
        counted(layers, given, "bfloat16", shares_casts=False),
    )
    shared = counted(layers, given, "bfloat16")
    assert casts_of(plain) == casts_of(apart) == 0 and casts_of(shared) == 2 * (MATRIX + BIAS)
    # The first weight is not needed: nobody asks for the gradient of data.
    pairs = zip(shared.layers, apart.layers, strict=True)
    assert [b.activation_bytes - a.activation_bytes for a, b in pairs] == [0, MATRIX]


def test_older_versions_of_torch_cast_in_each_graph(monkeypatch):
    monkeypatch.setattr(engine_precision, "casts_keep_their_graph", lambda: False)
    layers, given = [LayerSpec(nn.Linear, WIDTH, WIDTH)] * 2, torch.rand(3, WIDTH)
    model = counted(layers, given, "bfloat16")
    assert casts_of(model) == 0
    assert model.layers[1].activation_bytes == 2 * 3 * WIDTH + MATRIX


def test_a_tied_weight_is_cast_once_on_a_rank():
    layers = build_model("gpt", width=16, num_layers=1, tied=True)
    model = counted(layers, torch.zeros(2, 8, dtype=torch.int64), "bfloat16")
    matrix = 2 * 256 * 16

    def of(indices):
        return sum(weight.cast_bytes for weight in model.weights(indices))

    last = len(layers) - 1
    assert (of([0]), of([last]), of([0, last]), of([last, 0])) == (0, matrix, matrix, matrix)


SHAPE = {"vocab_size": 64, "block_size": 16, "num_layers": 2, "num_heads": 2, "width": 32}
SAMPLES, MICROBATCHES = 2, 6
LAYERS_OF_GPT = build_gpt(**SHAPE)


def gpt(precision: str):
    example = torch.empty(SAMPLES, 16, dtype=torch.int64, device="meta")
    return count_model(LAYERS_OF_GPT, example, example, token_cross_entropy, precision=precision)


def held_when_the_loss_begins(precision, recompute, schedule, counts) -> int:
    """Return the most bytes that a step has made and holds as it calls its loss function.

    Without gradients, which are planned apart.
    """
    tokens = torch.randint(64, (SAMPLES * MICROBATCHES, 16))
    living, most = Living(), []

    def loss_fn(output, targets):
        gradients = [p.grad for p in pipe.parameters() if p.grad is not None]
        most.append(living.nbytes() - sum(each.nbytes for each in gradients))
        return token_cross_entropy(output, targets)

    pipe = Pipeline(
        LAYERS_OF_GPT,
        loss_fn,
        microbatches=MICROBATCHES,
        schedule=schedule,
        recompute=recompute,
        partition=counts,
        precision=precision,
    )
    for _ in range(3):  # they look at more: the first one copies, to see what layers write to
        pipe.step(tokens, tokens)
    most.clear()
    for parameter in pipe.parameters():
        parameter.grad = None
    with living:
        pipe.step(tokens, tokens)
    return max(most)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule, counts", [("gpipe", [7]), ("interleaved", [3, 4])])
def test_what_a_step_holds_is_planned(precision, recompute, schedule, counts):
    """One rank, for autocast's memory is that of the process: threads would empty each other's."""
    held = held_when_the_loss_begins(precision, recompute, schedule, counts)
    model = gpt(precision)
    table = build(schedule, ranks=1, microbatches=MICROBATCHES, recompute=recompute)
    (rank,) = forecast(model, counts, lower(table), 0).ranks
    planned = rank.activation_bytes + rank.cast_bytes
    assert (rank.cast_bytes > planned / 20) == (precision != "float32")
    # The data were there before, and the loss has not kept its part yet.
    assert model.loss is not None
    data = MICROBATCHES * SAMPLES * 16 * 8
    assert planned - model.loss.activation_bytes - data <= held <= planned


def test_a_rank_holds_casts_once_and_all_that_it_sums_up():
    model = gpt("bfloat16")
    weights = model.weights(range(7))
    assert sum(w.cast_bytes for w in weights) == 2 * sum(
        w.num_elements for i in (1, 2, 3, 4, 6) for w in model.layers[i].weights[-4:]
    )
    for microbatches in (2, 4):
        table = lower(build("gpipe", ranks=2, microbatches=microbatches, recompute="never"))
        ranks = forecast(model, [3, 4], table, 2).ranks
        assert sum(rank.cast_bytes for rank in ranks) == casts_of(model)
        for rank in ranks:
            states = rank.weight_bytes + rank.gradient_bytes + rank.optimizer_bytes
            beside = rank.activation_bytes + rank.workspace_bytes
    assert rank.total_bytes == states + rank.cast_bytes + beside
    mirrored = lower(build("chimera", ranks=2, microbatches=4, recompute="never"))
    for rank in forecast(model, [3, 4], mirrored, 2).ranks:
        assert rank.cast_bytes == casts_of(model)


def test_a_budget_leaves_room_for_casts():
    model = gpt("bfloat16")
    bare = build("gpipe", ranks=1, microbatches=MICROBATCHES, recompute="never")
    (rank,) = forecast(model, [7], lower(bare), 2).ranks
    assert not any(choose_recompute(model, [7], bare, rank.total_bytes, 2).recomputed)
    tight = choose_recompute(model, [7], bare, rank.total_bytes - 1, 2)
    assert any(tight.recomputed)
    (rank,) = forecast(model, [7], lower(tight.schedule), 2, tight.recomputed).ranks
    assert rank.total_bytes < forecast(model, [7], lower(bare), 2).ranks[0].total_bytes


def test_casts_have_a_column_where_there_are_any():
    table = lower(build("gpipe", ranks=2, microbatches=4, recompute="never"))
    for precision, shown in (("bfloat16", True), ("float32", False)):
        ranks = forecast(gpt(precision), [3, 4], table, 2).ranks
        head, *rows = rank_table(ranks, Assumptions()).splitlines()
        assert head.split()[3:6] == ["weights", *["casts"] * shown, "gradients", "optimizer"][:3]
        for row, rank in zip(rows, ranks, strict=True):
            assert (bytes_text(rank.cast_bytes) in row) == shown
