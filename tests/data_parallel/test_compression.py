"""Training with compressed gradients: replicas stay equal, no gradient is lost, runs resume."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.data_parallel import FlatLayout
from gpipe_hpc.errors import ModelError, PeerError
from gpipe_hpc.settings import Outer
from tests.support import batches, choices_of, square_sum

WIDTH, ROWS = 6, 16
NAMES = choices_of(Outer, "compress")[1:]


class ConditionalLayer(nn.Module):
    """A layer whose second half runs only on micro-batches with a positive sum."""

    def __init__(self, width):
        super().__init__()
        self.always = nn.Linear(width, width, dtype=torch.float64)
        self.sometimes = nn.Linear(width, width, dtype=torch.float64)
        for parameter in self.parameters():
            parameter.data.abs_()

    def forward(self, x):
        x = torch.tanh(self.always(x))
        return self.sometimes(x) + x if x.sum() > 0 else x


def make(world, compress, stages=2, *, num_layers=4, outer=None, dtype=torch.float64, **options):
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=dtype) for _ in range(num_layers)]
    layers = options.pop("layers", layers)
    return Pipeline(
        layers,
        square_sum,
        stages=stages,
        replicas=world.size // stages,
        microbatches=options.pop("microbatches", 2),
        world=world,
        partition="uniform",
        outer={
            "compress": compress,
            "topk_fraction": 0.2,
            "powersgd_rank": 1,
            "bucket_bytes": 400,
            **(outer or {}),
        },
        **options,
    )


def step(pipe, batch):
    part = pipe.share(len(batch[0]))
    return pipe.step(batch[0][part], batch[1][part])


def gradients(pipe):
    named = pipe.named_parameters()
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def residuals_of(pipe):
    """Return this rank's residual of each parameter, in units of the summed loss."""
    return {
        name.removeprefix("residual.").rpartition(".")[0]: each.clone()
        for name, each in pipe.outer_state().items()
        if name.startswith("residual.")
    }


def run(compress, data, ranks=4, stages=2, **options):
    """Return for each rank its gradients of each step times the loss weight, and its residuals."""

    def body(world):
        pipe = make(world, compress, stages, **options)
        found = []
        for batch in data:
            result = step(pipe, batch)
            found.append(
                {n: None if g is None else g * result.weight for n, g in gradients(pipe).items()}
            )
        return found, residuals_of(pipe)

    return run_on_threads(ranks, body)


def by_replica(ranks, stages):
    return [ranks[start : start + stages] for start in range(0, len(ranks), stages)]


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1", "interleaved", "chimera"])
@pytest.mark.parametrize("compress", NAMES)
def test_sent_gradients_plus_residuals_equal_uncompressed_gradients(compress, schedule):
    """Over three steps without an optimizer, with mirrored stages among the schedules."""
    data = batches(3, ROWS, WIDTH)
    plain = run("none", data, schedule=schedule)
    ours = run(compress, data, schedule=schedule)
    first, *others = by_replica(ours, 2)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            for a, b in zip(mine[0], theirs[0], strict=True):
                assert all(torch.equal(a[name], b[name]) for name in a), "replicas differ"
    residual_sums: dict[str, torch.Tensor] = {}
    for _, residuals in ours:
        for name, each in residuals.items():
            residual_sums[name] = residual_sums.get(name, 0) + each
    assert residual_sums and max(each.abs().max() for each in residual_sums.values()) > 0
    for mine, theirs in zip(ours, plain, strict=True):
        for name in theirs[0][0]:
            whole = sum(each[name] for each in theirs[0])
            sent = sum(each[name] for each in mine[0])
            torch.testing.assert_close(sent + residual_sums[name], whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("compress", NAMES)
def test_unused_parameter_keeps_its_residual(compress):
    """Its gradient is None, so a residual that was sent would be lost."""
    layers = [LayerSpec(ConditionalLayer, WIDTH) for _ in range(2)]
    ones = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    targets = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    def body(world):
        pipe = make(world, compress, 1, layers=layers)
        name = "layers.0.sometimes.weight"
        step(pipe, (ones, targets))
        before = residuals_of(pipe)[name]
        step(pipe, (-9 * ones, targets))
        return gradients(pipe)[name], before, residuals_of(pipe)[name]

    residual_sum = 0.0
    for gradient, before, after in run_on_threads(2, body):
        assert gradient is None and torch.equal(before, after)
        residual_sum += before.abs().sum()
    assert residual_sum > 0


@pytest.mark.parametrize("compress", NAMES)
def test_parameter_used_on_one_replica_is_reduced_without_loss(compress):
    layers = [LayerSpec(ConditionalLayer, WIDTH) for _ in range(2)]
    inputs = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    inputs[ROWS // 2 :] = -9
    targets = torch.zeros_like(inputs)
    plain = run("none", [(inputs, targets)] * 3, 2, 1, layers=layers)
    ours = run(compress, [(inputs, targets)] * 3, 2, 1, layers=layers)
    for name in plain[0][0][0]:
        whole = sum(each[name] for each in plain[0][0])
        sent = sum(each[name] for each in ours[0][0])
        residual_sum = sum(residuals[name] for _, residuals in ours)
        torch.testing.assert_close(sent + residual_sum, whole, rtol=0, atol=1e-9)


def test_frozen_parameter_keeps_its_residual():
    """Freezing changes the buckets, but not which parameters have residuals."""

    def body(world):
        pipe = make(world, "topk", 1, outer={"bucket_bytes": 1e6})
        data = batches(3, ROWS, WIDTH)
        step(pipe, data[0])
        before = residuals_of(pipe)
        frozen = dict(pipe.named_parameters())["layers.1.weight"]
        frozen.requires_grad_(False)
        step(pipe, data[1])
        during = residuals_of(pipe)
        assert torch.equal(before["layers.1.weight"], during["layers.1.weight"])
        frozen.requires_grad_(True)
        step(pipe, data[2])
        return before, during, residuals_of(pipe)

    for before, during, after in run_on_threads(2, body):
        assert before.keys() == during.keys() == after.keys()
        assert not torch.equal(before["layers.0.weight"], during["layers.0.weight"])


@pytest.mark.parametrize("compress", NAMES)
def test_skipped_step_keeps_residuals(compress):
    """A float16 overflow on one replica leaves no gradient on any replica."""

    def body(world):
        pipe = make(world, compress, 1, precision="float16", dtype=torch.float32)
        data = batches(2, ROWS, WIDTH, dtype=torch.float32)
        assert not step(pipe, data[0]).is_skipped
        before = {name: each.clone() for name, each in pipe.outer_state().items()}
        inputs, targets = data[1]
        inputs[0] = 3e4
        skipped = step(pipe, (inputs, 3e4 * targets)).is_skipped
        assert all(p.grad is None for p in pipe.parameters())
        return skipped, before, dict(pipe.outer_state())

    for skipped, before, after in run_on_threads(2, body):
        assert skipped and before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("compress", NAMES)
def test_resumed_run_is_bitwise_equal(compress, tmp_path):
    data = batches(6, ROWS, WIDTH)

    def train(pipe, optimizer, steps):
        for batch in steps:
            step(pipe, batch)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
        return {name: p.detach().clone() for name, p in pipe.named_parameters()}

    def build(world, stages=2):
        pipe = make(world, compress, stages)
        return pipe, torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)

    def whole(world):
        pipe, optimizer = build(world)
        train(pipe, optimizer, data[:3])
        pipe.save(tmp_path / "kept", optimizer)
        return train(pipe, optimizer, data[3:]), residuals_of(pipe)

    def resumed(world):
        pipe, optimizer = build(world)
        pipe.load(tmp_path / "kept", optimizer)
        return train(pipe, optimizer, data[3:]), residuals_of(pipe)

    unbroken = run_on_threads(4, whole)
    for (mine, residuals), (theirs, expected) in zip(
        run_on_threads(4, resumed), unbroken, strict=True
    ):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert expected and all(torch.equal(residuals[name], expected[name]) for name in expected)


@pytest.mark.parametrize("layout", [(3, 1), (4, 2), (4, 1), (2, 1)])
def test_residuals_are_redistributed_when_the_layout_changes(layout, tmp_path):
    """The residuals of all old replicas are divided over the new ones; their sums stay the same."""
    ranks, stages = layout

    def saved(world):
        pipe = make(world, "topk", 2)
        step(pipe, batches(1, ROWS, WIDTH)[0])
        pipe.save(tmp_path / "kept", torch.optim.SGD(pipe.parameters(), lr=0.1))
        return residuals_of(pipe)

    def resumed(world):
        pipe = make(world, "topk", stages)
        pipe.load(tmp_path / "kept", torch.optim.SGD(pipe.parameters(), lr=0.1))
        return residuals_of(pipe)

    def total(ranks):
        named: dict[str, torch.Tensor] = {}
        for residuals in ranks:
            for name, each in residuals.items():
                named[name] = named.get(name, 0) + each
        return named

    before, after = total(run_on_threads(4, saved)), total(run_on_threads(ranks, resumed))
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-12)


def test_loading_without_optimizer_restores_no_residuals(tmp_path):
    def body(world):
        pipe = make(world, "topk", 1)
        step(pipe, batches(1, ROWS, WIDTH)[0])
        pipe.save(tmp_path / "kept", torch.optim.SGD(pipe.parameters(), lr=0.1))
        pipe.load(tmp_path / "kept")
        return residuals_of(pipe)

    assert run_on_threads(2, body) == [{}, {}]


@pytest.mark.parametrize(
    ("compress", "dtype"),
    [
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("topk", torch.complex64),
        ("qsgd", torch.complex64),
    ],
)
def test_compressor_rejects_unsupported_dtype_on_every_rank(compress, dtype):
    def body(world):
        try:
            make(world, compress, 2, dtype=dtype)
        except (ModelError, PeerError) as error:
            return str(error)

    for message in run_on_threads(4, body):
        assert "outer.compress" in message and "use outer.compress=none" in message


@pytest.mark.parametrize("compress", ["powersgd", "topk", "qsgd"])
def test_bfloat16_gradients_have_float32_residuals(compress):
    def body(world):
        pipe = make(world, compress, 1, dtype=torch.bfloat16)
        for batch in batches(2, ROWS, WIDTH, dtype=torch.bfloat16):
            step(pipe, batch)
        return residuals_of(pipe), gradients(pipe)

    (mine, sent), (_, other) = run_on_threads(2, body)
    assert {each.dtype for each in mine.values()} == {torch.float32}
    assert all(torch.equal(sent[name], other[name]) for name in sent)


@pytest.mark.parametrize("compress", NAMES)
def test_tied_parameters_are_not_compressed(compress):
    tied = LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False, dtype=torch.float64).tied(
        {"weight": "shared"}
    )
    layers = [tied, LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64), tied]
    data = batches(1, ROWS, WIDTH)
    plain = run("none", data, 4, 2, layers=layers, microbatches=2)
    ours = run(compress, data, 4, 2, layers=layers, microbatches=2)
    name = next(name for name in plain[0][0][0] if name.startswith("layers.0"))
    for mine, theirs in zip(ours, plain, strict=True):
        if name in theirs[0][0]:
            assert torch.equal(mine[0][0][name], theirs[0][0][name])
            assert name not in mine[1]


@pytest.mark.parametrize(("compress", "sent_bytes"), [("bfloat16", 2), ("none", 4)])
def test_sent_bytes_are_counted_in_each_step(compress, sent_bytes):
    """With two replicas, a ring sends each element once, like a direct exchange."""

    def body(world):
        pipe = make(world, compress, 1, num_layers=2, dtype=torch.float32)
        found = []
        for batch in batches(2, ROWS, WIDTH, dtype=torch.float32):
            before = pipe.outer_sent_bytes
            step(pipe, batch)
            found.append(pipe.outer_sent_bytes - before)
        sizes = {name: p.numel() for name, p in pipe.named_parameters()}
        rows = [
            FlatLayout({name: sizes[name] for name in bucket}).num_elements
            for bucket in pipe.layout.tables.buckets[0]
        ]
        return found, sum(rows)

    for found, count in run_on_threads(2, body):
        assert found == [sent_bytes * count] * 2
        assert count >= 2 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize("compress", ["powersgd", "topk"])
def test_training_with_compression_converges(compress):
    """Least squares, with a learning rate small enough for gradients that are added late."""
    generator = torch.Generator().manual_seed(8)
    truth = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    inputs = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    def body(world):
        pipe = make(world, compress, 1, num_layers=1)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.02)
        for _ in range(600):
            loss = step(pipe, (inputs, inputs @ truth)).loss
            optimizer.step()
        return loss

    assert max(run_on_threads(2, body)) < 1e-3


def test_common_spelling_of_compressor_is_accepted():
    def body(world):
        return make(world, "BF16", 1).request.combining.compress

    assert run_on_threads(2, body) == ["bfloat16"] * 2
