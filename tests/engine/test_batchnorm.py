"""BatchNorm in a pipeline: normalises each micro-batch, updates its statistics once per step.

The reference is a plain loop over torch's own layers that runs one micro-batch after the other.
It stores the inputs of each BatchNorm and updates its buffers once per step from all of them.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.errors import ActionError, DataError, ModelError
from gpipe_hpc.models import classification
from tests.support import buffers_of, square_sum

STEPS = 5
RATE = 0.01


class Block(nn.Module):
    """Two BatchNorm layers with a convolution and a shortcut; the last ReLU works in place."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4, momentum=momentum)
        self.again = nn.BatchNorm2d(4, momentum=momentum, affine=False)

    def forward(self, x):
        return torch.relu_(self.again(x + torch.relu(self.norm(self.first(x)))))


def model():
    """Return the layers; eps is large for two values per channel, which would magnify rounding."""
    torch.manual_seed(1)
    layers = [
        nn.BatchNorm2d(2),
        nn.Conv2d(2, 4, 3, padding=1),
        Block(),
        Block(momentum=None),
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 6)),
        nn.BatchNorm1d(6, track_running_stats=False, eps=0.5),
        nn.Sequential(nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=0.3, eps=0.5)),
        nn.Linear(5, 3),
    ]
    return [layer.double() for layer in layers]


def batches(samples):
    generator = torch.Generator().manual_seed(0)
    make = {"generator": generator, "dtype": torch.float64}
    return [
        (torch.randn(samples, 2, 4, 4, **make) * 3 + 1, torch.randn(samples, 3, **make))
        for _ in range(STEPS)
    ]


def norms_of(layers):
    return [m for m in nn.ModuleList(layers).modules() if isinstance(m, _BatchNorm)]


def train_plain(samples, cut):
    """Train in one process, with micro-batches by `cut`; return losses, gradients, model."""
    layers = model()
    norms = [norm for norm in norms_of(layers) if norm.track_running_stats]
    given = {norm: [] for norm in norms}
    for norm in norms:
        norm.register_forward_pre_hook(lambda m, args: given[m].append(args[0].detach().clone()))
    whole = nn.Sequential(*layers)
    losses, gradients = [], []
    for inputs, targets in batches(samples):
        before = {norm: copy.deepcopy(norm.state_dict()) for norm in norms}
        whole.zero_grad()
        total = 0.0
        for x, y in zip(cut(inputs), cut(targets), strict=True):
            loss, _ = square_sum(whole(x), y)
            (loss / samples).backward()
            total += loss.item() / samples
        for norm in norms:
            values = torch.cat(given[norm]).transpose(0, 1).flatten(1)
            given[norm].clear()
            norm.load_state_dict(before[norm])
            norm.num_batches_tracked += 1
            share = norm.momentum or 1 / norm.num_batches_tracked.item()
            norm.running_mean.lerp_(values.mean(1), share)
            norm.running_var.lerp_(values.var(1), share)
        losses.append(total)
        gradients.append({n: p.grad.clone() for n, p in whole.named_parameters()})
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter -= RATE * parameter.grad
    return losses, gradients, whole


def train(samples, ranks, replicas=1, run=run_on_threads, **options):
    """Train a pipeline; return each rank's losses, gradients, buffers and evaluation loss."""
    made = model()  # outside of the threads, which share torch's generator

    def body(world):
        layers = copy.deepcopy(made)
        pipe = Pipeline(layers, square_sum, stages=ranks, replicas=replicas, world=world, **options)
        losses, gradients = [], []
        for inputs, targets in batches(samples):
            part = pipe.share(samples)
            losses.append(pipe.step(inputs[part], targets[part]).loss)
            gradients.append({n: p.grad.clone() for n, p in pipe.named_parameters()})
            with torch.no_grad():
                for parameter in pipe.parameters():
                    parameter -= RATE * parameter.grad
        inputs, targets = batches(samples)[0]
        part = pipe.share(samples)
        # Without running statistics, a micro-batch of one sample cannot be evaluated.
        evaluates = samples >= 2 * pipe.num_global_microbatches
        evaluated = pipe.evaluate(inputs[part], targets[part]).loss if evaluates else None
        return losses, gradients, buffers_of(pipe), evaluated

    return run(ranks * replicas, body)


def assert_plain_training(samples, results, num_pieces, cut=None):
    def pieces_of(batch):
        return batch.tensor_split(num_pieces)

    losses, gradients, whole = train_plain(samples, cut or pieces_of)
    near = {"rtol": 1e-10, "atol": 1e-11}
    all_buffers = {}
    for our_losses, ours, buffers, _ in results:
        assert our_losses == pytest.approx(losses, rel=1e-12)
        for step, named in enumerate(ours):
            for name, gradient in named.items():
                expected = gradients[step][name.removeprefix("layers.")]
                assert torch.allclose(gradient, expected, **near), (step, name)
        for name, buffer in buffers.items():
            assert torch.equal(all_buffers.setdefault(name, buffer), buffer), (
                f"copies of {name} differ"
            )
    expected = {f"layers.{name}": buffer for name, buffer in whole.named_buffers()}
    assert all_buffers.keys() == expected.keys() and len(all_buffers) == 21 - 3
    for name, buffer in expected.items():
        assert torch.allclose(all_buffers[name], buffer, rtol=1e-12, atol=1e-12), name
    if results[0][-1] is not None:
        inputs, targets = batches(samples)[0]
        whole.eval()  # per micro-batch, since one layer has no running statistics
        pieces = zip(pieces_of(inputs), pieces_of(targets), strict=True)
        total = sum(square_sum(whole(x), y)[0].item() for x, y in pieces)
        expected = [total / samples] * len(results)
        assert [evaluated for *_, evaluated in results] == pytest.approx(expected, rel=1e-12)


LAYOUTS = [
    # samples, ranks, replicas, micro-batches, schedule, recompute
    (5, 2, 1, 1, "gpipe", "except_last"),
    (11, 4, 1, 3, "gpipe", "always"),
    (8, 3, 1, 4, "gpipe", "never"),
    (9, 2, 1, 4, "one_f_one_b", "except_last"),
    (8, 4, 1, 4, "zb_h1", "never"),
    (9, 4, 1, 4, "zb_h1", "always"),
    (13, 2, 2, 3, "gpipe", "always"),
    (17, 2, 2, 4, "chimera", "except_last"),
    (8, 4, 1, 4, "chimera", "always"),
    (8, 2, 1, 4, "interleaved", "never"),
    (9, 2, 1, 4, "zb_v", "always"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
def test_training_equals_plain_loop(layout):
    samples, ranks, replicas, microbatches, schedule, recompute = layout
    results = train(
        samples,
        ranks,
        replicas,
        microbatches=microbatches,
        schedule=schedule,
        recompute=recompute,
    )
    assert_plain_training(samples, results, replicas * microbatches)


@pytest.mark.parametrize(
    "layout",
    [
        (11, 2, 2, 3, "gpipe", "always"),
        (7, 1, 3, 2, "gpipe", "never"),
        (13, 2, 2, 4, "zb_h1", "always"),
        (17, 2, 2, 4, "chimera", "except_last"),
        (9, 4, 1, 4, "gpipe", "never"),
    ],
    ids=lambda layout: "-".join(map(str, layout)),
)
def test_batchnorm_normalises_over_replicas(layout):
    samples, ranks, replicas, microbatches, schedule, recompute = layout
    results = train(
        samples,
        ranks,
        replicas,
        microbatches=microbatches,
        schedule=schedule,
        recompute=recompute,
        normalise_over_replicas=True,
    )

    def together(batch):
        pieces = batch.tensor_split(replicas * microbatches)
        return [torch.cat(pieces[m::microbatches]) for m in range(microbatches)]

    assert_plain_training(samples, results, replicas * microbatches, together)


@pytest.mark.slow
def test_batchnorm_normalises_over_processes(processes, tmp_path):
    def run(size, body):
        return processes(size, lambda rank: body(None), tmp_path)

    options = {"microbatches": 2, "recompute": "always", "normalise_over_replicas": True}
    results = train(9, 1, 2, run, **options)

    def together(batch):
        pieces = batch.tensor_split(4)
        return [torch.cat(pieces[m::2]) for m in range(2)]

    assert_plain_training(9, results, 4, together)


def test_empty_microbatch_raises_error_with_its_number():
    with pytest.raises(DataError, match=r"replica 1: micro-batch 2 has no samples.* use larger"):
        train(5, 1, 2, microbatches=3, normalise_over_replicas=True)


def test_empty_microbatch_is_allowed_without_batchnorm():
    layers = [nn.Flatten(), nn.Linear(32, 3)]

    def body(world):
        pipe = Pipeline(
            copy.deepcopy(layers),
            nn.functional.mse_loss,
            replicas=2,
            microbatches=2,
            normalise_over_replicas=True,
            world=world,
        )
        part = pipe.share(3)
        return pipe.step(torch.ones(3, 2, 4, 4)[part], torch.ones(3, 3)[part]).weight

    assert run_on_threads(2, body) == [3.0, 3.0]


def test_one_value_per_channel_raises_error_naming_the_layer():
    expected = (
        r"rank 1, stage 1, micro-batch 2.*ModelError: layers\.5 \(BatchNorm1d\): expected at least "
        r"2 values per channel to normalise, got a micro-batch of shape \(1, 6\); use larger"
    )
    with pytest.raises(ActionError, match=expected):
        train(5, 2, microbatches=3, partition=[4, 4])


def test_converted_layers_are_known_on_all_ranks_and_logged_once(caplog):
    class Own(nn.BatchNorm2d):
        pass

    layers = [nn.BatchNorm2d(2), Own(2), nn.Sequential(nn.Flatten(), nn.BatchNorm1d(8))]

    def body(world):
        pipe = Pipeline(copy.deepcopy(layers), nn.functional.mse_loss, world=world)
        return pipe.batchnorm

    with caplog.at_level("INFO", logger="gpipe_hpc"):
        found = run_on_threads(3, body)
    assert found == [(("layers.0", "layers.2.1"), ("layers.1 (Own)",))] * 3
    messages = [r.getMessage() for r in caplog.records if r.name == "gpipe_hpc.pipeline"]
    assert len(messages) == 2
    assert messages[0] == "BatchNorm over micro-batches: layers.0, layers.2.1"
    assert messages[1].startswith("layers.1 (Own): running statistics treat each micro-batch")


def test_checkpoint_contains_running_statistics(tmp_path):
    made = model()
    inputs, targets = batches(8)[0]

    def body(world):
        pipe = Pipeline(copy.deepcopy(made), square_sum, microbatches=2, world=world)
        pipe.step(inputs, targets)
        pipe.save(tmp_path / "kept")
        return buffers_of(pipe)

    def resumed(world):
        pipe = Pipeline(model(), square_sum, microbatches=4, world=world)
        pipe.load(tmp_path / "kept")
        return buffers_of(pipe)

    saved = {name: buffer for rank in run_on_threads(2, body) for name, buffer in rank.items()}
    (loaded,) = run_on_threads(1, resumed)
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], buffer) for name, buffer in saved.items())
    assert loaded["layers.3.norm.num_batches_tracked"] == 1


def test_layer_in_eval_mode_keeps_its_statistics():
    made = model()
    made[2].norm.eval()
    inputs, targets = batches(8)[0]

    def body(world):
        pipe = Pipeline(copy.deepcopy(made), square_sum, microbatches=2, world=world)
        pipe.step(inputs, targets)
        return buffers_of(pipe)

    ranks = run_on_threads(2, body)
    buffers = {name: buffer for rank in ranks for name, buffer in rank.items()}
    assert torch.equal(buffers["layers.2.norm.running_mean"], torch.zeros(4))
    assert buffers["layers.2.norm.num_batches_tracked"] == 0
    assert buffers["layers.2.again.num_batches_tracked"] == 1


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_autocast_training_equals_plain_loop(recompute):
    """The reference is a plain loop over micro-batches under autocast."""
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Flatten(), nn.Linear(16, 3))]
    inputs, targets = (each.float() for each in batches(6)[0])
    plain = nn.Sequential(*copy.deepcopy(layers))
    losses, convolved = [], []
    for x, y in zip(inputs.split(2), targets.split(2), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            convolved.append(plain[0](x).detach().float())
            losses.append(square_sum(plain(x), y)[0])
        losses[-1].backward()
    whole = torch.cat(convolved)

    def body(world):
        pipe = Pipeline(
            copy.deepcopy(layers),
            square_sum,
            microbatches=3,
            recompute=recompute,
            precision="bfloat16",
            world=world,
            partition=[2, 1],
        )
        result = pipe.step(inputs, targets)
        gradients = {n: p.grad for n, p in pipe.named_parameters()}
        return result.loss, gradients, buffers_of(pipe)

    (loss, gradients, buffers), (_, others, _) = run_on_threads(2, body)
    assert loss == pytest.approx(sum(losses).item() / 6, rel=1e-6)
    for name, parameter in plain.named_parameters():
        ours = (gradients | others)[f"layers.{name}"]
        assert torch.allclose(ours, parameter.grad / 6, rtol=1e-5, atol=1e-6), name
    mean = 0.1 * whole.mean((0, 2, 3))
    assert torch.allclose(buffers["layers.1.running_mean"], mean, rtol=1e-4, atol=1e-6)
    variance = 0.9 + 0.1 * whole.var((0, 2, 3))
    assert torch.allclose(buffers["layers.1.running_var"], variance, rtol=1e-4)


def test_shared_batchnorm_raises_error_unless_in_eval_mode():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm)
    with pytest.raises(ModelError, match=r"layers\.2 \(BatchNorm1d\): .* as in layers\.0, "):
        Pipeline(model, classification)
    norm.eval()
    Pipeline(model, classification)
