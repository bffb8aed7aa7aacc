"""Training with compressed gradients: replicas stay equal, nothing is lost, a run goes on."""

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


class Sometimes(nn.Module):
    """A layer of which a second half works only on positive micro-batches."""

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


def owed(pipe):
    """Return what this rank still owes of each parameter, in units of the summed loss."""
    return {
        name.removeprefix("residual.").rpartition(".")[0]: each.clone()
        for name, each in pipe.outer_state().items()
        if name.startswith("residual.")
    }


def run(compress, data, ranks=4, stages=2, **options):
    """Return of each rank: gradients of each step times the loss weight, and what it owes."""

    def body(world):
        pipe = make(world, compress, stages, **options)
        found = []
        for batch in data:
            result = step(pipe, batch)
            found.append(
                {n: None if g is None else g * result.weight for n, g in gradients(pipe).items()}
            )
        return found, owed(pipe)

    return run_on_threads(ranks, body)


def by_replica(ranks, stages):
    return [ranks[start : start + stages] for start in range(0, len(ranks), stages)]


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1", "interleaved", "chimera"])
@pytest.mark.parametrize("compress", NAMES)
def test_sent_and_owed_are_the_plain_gradients(compress, schedule):
    """Over steps without an optimizer, in every kind of schedule, mirrored stages among them."""
    data = batches(3, ROWS, WIDTH)
    plain = run("none", data, schedule=schedule)
    ours = run(compress, data, schedule=schedule)
    first, *others = by_replica(ours, 2)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            for a, b in zip(mine[0], theirs[0], strict=True):
                assert all(torch.equal(a[name], b[name]) for name in a), "replicas differ"
    held: dict[str, torch.Tensor] = {}
    for _, residuals in ours:
        for name, each in residuals.items():
            held[name] = held.get(name, 0) + each
    assert held and max(each.abs().max() for each in held.values()) > 0
    for mine, theirs in zip(ours, plain, strict=True):
        for name in theirs[0][0]:
            whole = sum(each[name] for each in theirs[0])
            sent = sum(each[name] for each in mine[0])
            torch.testing.assert_close(sent + held[name], whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("compress", NAMES)
def test_a_parameter_that_nobody_used_keeps_its_residual(compress):
    """Its gradient is None, so what was sent of it would be lost."""
    layers = [LayerSpec(Sometimes, WIDTH) for _ in range(2)]
    ones = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    targets = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    def body(world):
        pipe = make(world, compress, 1, layers=layers)
        name = "layers.0.sometimes.weight"
        step(pipe, (ones, targets))
        before = owed(pipe)[name]
        step(pipe, (-9 * ones, targets))
        return gradients(pipe)[name], before, owed(pipe)[name]

    lost = 0.0
    for gradient, before, after in run_on_threads(2, body):
        assert gradient is None and torch.equal(before, after)
        lost += before.abs().sum()
    assert lost > 0


@pytest.mark.parametrize("compress", NAMES)
def test_a_parameter_that_one_replica_used_is_summed(compress):
    layers = [LayerSpec(Sometimes, WIDTH) for _ in range(2)]
    inputs = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    inputs[ROWS // 2 :] = -9
    targets = torch.zeros_like(inputs)
    plain = run("none", [(inputs, targets)] * 3, 2, 1, layers=layers)
    ours = run(compress, [(inputs, targets)] * 3, 2, 1, layers=layers)
    for name in plain[0][0][0]:
        whole = sum(each[name] for each in plain[0][0])
        sent = sum(each[name] for each in ours[0][0])
        held = sum(residuals[name] for _, residuals in ours)
        torch.testing.assert_close(sent + held, whole, rtol=0, atol=1e-9)


def test_frozen_parameters_change_the_buckets_and_not_what_is_owed():
    def body(world):
        pipe = make(world, "topk", 1, outer={"bucket_bytes": 1e6})
        data = batches(3, ROWS, WIDTH)
        step(pipe, data[0])
        before = owed(pipe)
        frozen = dict(pipe.named_parameters())["layers.1.weight"]
        frozen.requires_grad_(False)
        step(pipe, data[1])
        during = owed(pipe)
        assert torch.equal(before["layers.1.weight"], during["layers.1.weight"])
        frozen.requires_grad_(True)
        step(pipe, data[2])
        return before, during, owed(pipe)

    for before, during, after in run_on_threads(2, body):
        assert before.keys() == during.keys() == after.keys()
        assert not torch.equal(before["layers.0.weight"], during["layers.0.weight"])


@pytest.mark.parametrize("compress", NAMES)
def test_a_skipped_step_leaves_residuals_as_they_were(compress):
    """A float16 overflow on one replica: no gradient anywhere, and nothing lost."""

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
def test_a_run_goes_on_to_the_bit(compress, tmp_path):
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
        return train(pipe, optimizer, data[3:]), owed(pipe)

    def resumed(world):
        pipe, optimizer = build(world)
        pipe.load(tmp_path / "kept", optimizer)
        return train(pipe, optimizer, data[3:]), owed(pipe)

    unbroken = run_on_threads(4, whole)
    for (mine, left), (theirs, owes) in zip(run_on_threads(4, resumed), unbroken, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert owes and all(torch.equal(left[name], owes[name]) for name in owes)


@pytest.mark.parametrize("layout", [(3, 1), (4, 2), (4, 1), (2, 1)])
def test_other_replicas_take_over_all_that_is_owed(layout, tmp_path):
    """Nothing is lost: the residuals of all old replicas are divided over the new ones."""
    ranks, stages = layout

    def saved(world):
        pipe = make(world, "topk", 2)
        step(pipe, batches(1, ROWS, WIDTH)[0])
        pipe.save(tmp_path / "kept", torch.optim.SGD(pipe.parameters(), lr=0.1))
        return owed(pipe)

    def resumed(world):
        pipe = make(world, "topk", stages)
        pipe.load(tmp_path / "kept", torch.optim.SGD(pipe.parameters(), lr=0.1))
        return owed(pipe)

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


def test_weights_alone_bring_no_residuals(tmp_path):
    def body(world):
        pipe = make(world, "topk", 1)
        step(pipe, batches(1, ROWS, WIDTH)[0])
        pipe.save(tmp_path / "kept", torch.optim.SGD(pipe.parameters(), lr=0.1))
        pipe.load(tmp_path / "kept")
        return owed(pipe)

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
def test_a_compressor_that_does_not_fit_the_dtype_is_refused_on_every_rank(compress, dtype):
    def body(world):
        try:
            make(world, compress, 2, dtype=dtype)
        except (ModelError, PeerError) as error:
            return str(error)

    for told in run_on_threads(4, body):
        assert "outer.compress" in told and "use outer.compress=none" in told


@pytest.mark.parametrize("compress", ["powersgd", "topk", "qsgd"])
def test_weights_of_16_bits_are_compressed_with_float32_residuals(compress):
    def body(world):
        pipe = make(world, compress, 1, dtype=torch.bfloat16)
        for batch in batches(2, ROWS, WIDTH, dtype=torch.bfloat16):
            step(pipe, batch)
        return owed(pipe), gradients(pipe)

    (mine, sent), (_, other) = run_on_threads(2, body)
    assert {each.dtype for each in mine.values()} == {torch.float32}
    assert all(torch.equal(sent[name], other[name]) for name in sent)


@pytest.mark.parametrize("compress", NAMES)
def test_tied_parameters_are_summed_whole(compress):
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
def test_bytes_sent_in_a_step_are_counted(compress, sent_bytes):
    """With two copies a ring sends each element once, as often as an exchange does."""

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
def test_the_steps_come_near_those_of_plain_sums(compress):
    """Least squares, with a learning rate at which what is added later does no harm."""
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


def test_spellings_of_the_field_are_known():
    def body(world):
        return make(world, "BF16", 1).request.combining.compress

    assert run_on_threads(2, body) == ["bfloat16"] * 2
