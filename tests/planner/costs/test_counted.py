"""Counts against formulas, and against what autograd really keeps."""

import resource

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.precision import casting, keeping_casts
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import LayerSpec, build_gpt, build_mlp, build_model, token_cross_entropy
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.stages import count_stages


def vectors(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


def tokens(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int64, device="meta")


def assert_keeps(num_bytes: int, layers, example, **settings):
    """Assert what the whole model keeps for one micro-batch."""
    model = count_model(layers, example, **settings)
    assert count_stages(model, [len(layers)])[0].activation_bytes == num_bytes


def test_linear_has_two_flops_a_weight_and_sample():
    first, second = count_model(
        [LayerSpec(nn.Linear, 8, 16), LayerSpec(nn.Linear, 16, 4)], vectors(3, 8)
    ).layers
    assert (first.parameters, second.parameters) == (8 * 16 + 16, 16 * 4 + 4)
    assert (first.forward_flops, second.forward_flops) == (2 * 3 * 8 * 16, 2 * 3 * 16 * 4)
    # Nobody asks for the gradient of data.
    assert (first.backward_flops, first.input_flops) == (2 * 3 * 8 * 16, 0)
    assert (second.backward_flops, second.input_flops) == (4 * 3 * 16 * 4, 2 * 3 * 16 * 4)
    assert (first.output_bytes, second.output_bytes) == (3 * 16 * 4, 3 * 4 * 4)


def test_convolution_has_two_flops_a_weight_and_output_pixel():
    (layer,) = count_model([LayerSpec(nn.Conv2d, 3, 8, 3, padding=1)], vectors(2, 3, 5, 5)).layers
    assert layer.forward_flops == 2 * (2 * 5 * 5) * 8 * (3 * 3 * 3)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_gpt_has_the_flops_of_its_formula(device_type):
    """24 B S H^2 + 4 B S^2 H a block and 2 B S H V for the head; twice that backwards.

    The fused attention computes its scores once more in the backward: 2 B S^2 H.
    """
    B, S, H, V, blocks = 3, 16, 32, 50, 2
    layers = build_gpt(vocab_size=V, block_size=S, num_layers=blocks, num_heads=4, width=H)
    counts = count_model(layers, tokens(B, S), device_type=device_type).layers
    products, attention, head = 24 * B * S * H * H, 4 * B * S * S * H, 2 * B * S * H * V
    assert sum(c.forward_flops for c in counts) == blocks * (products + attention) + head
    backward = blocks * (2 * products + 2.5 * attention) + 2 * head
    assert sum(c.backward_flops for c in counts) == backward
    assert counts[1] == counts[3] and counts[2] == counts[4]


def test_an_mlp_keeps_its_inputs_and_activations_once():
    """ReLU keeps its output, which the next linear layer keeps as its input."""
    layers = build_mlp([8, 32, 16, 4])
    model = count_model(layers, vectors(5, 8))
    kept = [layer.activation_bytes for layer in model.layers]
    assert kept == [4 * 5 * each for each in (8, 32, 32, 16, 16)]
    assert_keeps(4 * 5 * (8 + 32 + 16), layers, vectors(5, 8))
    # Cut behind the first ReLU, both stages keep a tensor of 32: it is there twice.
    first, second = count_stages(model, [2, 3])
    assert first.activation_bytes == 4 * 5 * (8 + 32)
    assert second.activation_bytes == 4 * 5 * (32 + 16)
    assert second.lives(second.layers).kept == 4 * 5 * 32 == sum(first.output.gradients)


def test_a_stage_holds_on_to_its_input_and_passes_on_what_it_has_no_layers_for():
    model = count_model(build_mlp([8, 32, 16]), vectors(5, 8))
    tail = count_stages(model, [1, 0, 2])
    assert tail[1].activation_bytes == 4 * 5 * 32  # its gradient will be sent back
    assert tail[1].output == tail[1].input == tail[2].input


def test_views_and_layers_that_keep_nothing_add_nothing():
    layers = [
        LayerSpec(nn.Linear, 6, 6),
        LayerSpec(nn.Identity),
        LayerSpec(nn.Flatten),
        LayerSpec(nn.Linear, 12, 3),
    ]
    assert_keeps(4 * (2 * 2 * 6 + 2 * 2 * 6), layers, vectors(2, 2, 6))


class Two(nn.Module):
    """Takes and gives a nest; None and an int64 tensor cross as they are."""

    def forward(self, given: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        x = given["x"]
        assert x is not None
        return {"x": x.exp(), "mask": given["mask"], "none": None}


def test_nests_cross_boundaries():
    inputs = {"x": vectors(4, 2).requires_grad_(), "mask": tokens(4), "none": None}
    model = count_model([LayerSpec(Two), LayerSpec(Two)], inputs)
    assert model.layers[0].output_bytes == 4 * 2 * 4 + 4 * 8
    assert sum(model.layers[0].output.gradients) == 4 * 2 * 4
    assert model.layers[1].activation_bytes == 4 * 2 * 4  # exp keeps its result


def saved_bytes(module: nn.Module, *given: Tensor) -> int:
    """Return what autograd keeps of all runs together."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = [module(each) for each in given]
    del outputs
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_gpt_is_counted_to_keep_what_it_keeps(dropout):
    layers = build_model("gpt", width=32, num_layers=2, block_size=16, dropout=dropout)
    real = nn.Sequential(*(layer.build() for layer in layers))
    assert_keeps(saved_bytes(real, torch.randint(256, (3, 16))), layers, tokens(3, 16))


class Casting(nn.Module):
    """Runs as a stage does."""

    def __init__(self, inner: nn.Module, precision: str) -> None:
        super().__init__()
        self.inner, self.precision = inner, precision

    def forward(self, x: Tensor) -> Tensor:
        with casting(self.precision, HostDevice()):
            return self.inner(x)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt", "vision"])
def test_activations_under_autocast_are_those_it_keeps(name, precision):
    """Copies of weights in the lower precision are none of them: a step makes them once."""
    if name == "gpt":
        layers = build_model("gpt", width=32, num_layers=2, block_size=16)
        given = torch.randint(256, (3, 16))
    else:
        kinds = [LayerSpec(nn.Conv2d, 3, 8, 3), LayerSpec(nn.BatchNorm2d, 8), LayerSpec(nn.ReLU)]
        layers = [*kinds, LayerSpec(nn.Flatten), LayerSpec(nn.Linear, 8 * 36, 10)]
        given = torch.rand(3, 3, 8, 8)
    real = nn.Sequential(*(layer.build() for layer in layers))
    real = Casting(real, precision)
    with keeping_casts(precision, HostDevice()):
        kept = saved_bytes(real, given, given.clone()) - saved_bytes(real, given)
    example = torch.empty_like(given, device="meta")
    model = count_model(layers, example, precision=precision)
    counted = count_stages(model, [len(layers)])[0].activation_bytes
    # Two numbers a channel of BatchNorm are kept in float32, and counted in the lower precision.
    assert kept - counted == (8 * 2 * 2 if name == "vision" else 0)
    assert kept != count_stages(count_model(layers, example), [len(layers)])[0].activation_bytes


def test_a_loss_module_with_weights_is_counted_and_left_alone():
    weights = torch.rand(4)
    loss_fn = nn.CrossEntropyLoss(weight=weights)
    for precision in ("float32", "bfloat16"):
        layers = [LayerSpec(nn.Linear, 8, 4)]
        model = count_model(layers, vectors(3, 8), tokens(3), loss_fn, precision=precision)
        assert model.loss is not None and model.loss.activation_bytes >= 3 * 4 * 4
    assert loss_fn.weight is weights


def test_fused_attention_keeps_no_scores():
    def inside(device_type: str, dropout: float) -> int:
        layers = build_gpt(256, 512, 1, 2, 8, dropout)
        example = tokens(1, 512)
        return count_model(layers, example, device_type=device_type).layers[1].activation_bytes

    scores = 2 * 512 * 512 * 4
    assert inside("cuda", 0.1) < scores and inside("cpu", 0.0) < scores
    assert inside("cpu", 0.1) > scores


def test_fused_dropout_keeps_a_byte_an_element():
    def kept(device_type: str, **settings: object) -> int:
        layers = [LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Dropout, 0.1, **settings)]
        return (
            count_model(layers, vectors(5, 8), device_type=device_type).layers[1].activation_bytes
        )

    assert (kept("cpu"), kept("cuda")) == (4 * 40, 40)
    assert kept("cuda", inplace=True) == 4 * 40


def test_the_loss_belongs_to_the_last_stage():
    layers = build_model("gpt", width=16, num_layers=1, block_size=8, vocab_size=64)
    model = count_model(layers, tokens(2, 8), tokens(2, 8), token_cross_entropy)
    assert model.loss is not None
    logits = 2 * 8 * 64 * 4
    assert logits <= model.loss.activation_bytes < 1.2 * logits
    counts = [2, 3]
    without = count_model(layers, tokens(2, 8))
    extra = [
        a.activation_bytes - b.activation_bytes
        for a, b in zip(count_stages(model, counts), count_stages(without, counts), strict=True)
    ]
    assert extra == [0, model.loss.activation_bytes]


def test_the_cost_of_the_loss_is_added_to_the_last_layer_alone():
    layers = [LayerSpec(nn.Linear, 8, 8) for _ in range(3)]
    model = count_model(layers, vectors(5, 8), vectors(5, 8), lambda y, t: (y @ t.T).sum())
    assert model.loss is not None and model.loss.forward_flops > 0
    costs = [cost for each in count_stages(model, [1, 2]) for cost in each.forward_costs]
    plain = [layer.forward_flops for layer in model.layers]
    assert costs == [*plain[:-1], plain[-1] + model.loss.forward_flops]


def test_tied_parameters_count_once():
    tied = build_model("gpt2")
    model = count_model(tied, tokens(1, 8))
    assert model.parameters == 124_439_808
    ends = model.weights([0, len(tied) - 1])
    assert sum(w.num_elements for w in ends) == 50257 * 768 + 1024 * 768
    assert sum(w.num_elements for w in model.weights([len(tied) - 1])) == 50257 * 768


def test_modules_that_come_built_stay_as_they_are():
    linear = nn.Linear(4, 4)
    linear.weight.grad = torch.ones(4, 4)
    norm = nn.BatchNorm1d(4)
    before = linear.weight.detach().clone()
    model = count_model([linear, norm, linear], vectors(3, 4))
    assert model.parameters == 20 + 8
    assert torch.equal(linear.weight, before) and torch.equal(linear.weight.grad, torch.ones(4, 4))
    assert norm.num_batches_tracked == 0 and not norm.running_mean.is_meta
    assert model.layers[0].forward_flops == model.layers[2].forward_flops == 2 * 3 * 4 * 4


def test_frozen_parameters_need_no_gradient():
    linear = nn.Linear(4, 4).requires_grad_(False)
    (layer,) = count_model([linear], vectors(3, 4)).layers
    assert layer.backward_flops == layer.activation_bytes == 0
    assert not any(weight.is_trained for weight in layer.weights)


class Peeking(nn.Module):
    """Looks at values, which meta tensors have not."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


@pytest.mark.parametrize(
    "layer, message",
    [
        (LayerSpec(Peeking), r"layers\.1 \(Peeking\): cannot be counted.* float32\[3, 4\]"),
        (LayerSpec(nn.Linear, 5, 5), r"layers\.1 \(Linear\): cannot be counted"),
    ],
)
def test_a_layer_that_cannot_be_counted_is_named(layer, message):
    with pytest.raises(ModelError, match=message):
        count_model([LayerSpec(nn.Linear, 4, 4), layer], vectors(3, 4))


def test_a_loss_that_cannot_be_counted_is_named():
    said = r"^loss: cannot .* output float32\[3, 4\] and targets int64\[7\].*; correct the loss"
    with pytest.raises(ModelError, match=said):
        count_model([LayerSpec(nn.Linear, 4, 4)], vectors(3, 4), tokens(7), F.cross_entropy)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def test_a_layer_with_a_reentrant_checkpoint_is_counted():
    """`recompute=budget` refused it, and said not to read values of tensors."""
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(Checkpointed, True)]
    counted = count_model(layers, vectors(3, 4)).layers[1]
    other = count_model([layers[0], LayerSpec(Checkpointed, False)], vectors(3, 4)).layers[1]
    forward = 2 * 3 * (4 * 8 + 8 * 4)
    assert counted.forward_flops == other.forward_flops == forward
    assert counted.backward_flops == 3 * forward  # its forward again, and both halves
    assert counted.input_flops == counted.backward_flops, "it comes in one piece"
    assert counted.activation_bytes == other.activation_bytes == 4 * 3 * 4


class Counting(nn.Module):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        log.append("made")

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_equal_layers_are_built_once_for_inputs_of_one_structure():
    log: list[str] = []
    layers = [LayerSpec(Counting, log)] * 5 + [LayerSpec(nn.Linear, 4, 5)]
    count_model([*layers, LayerSpec(Counting, log)], vectors(3, 4))
    assert log == ["made", "made"]


@pytest.mark.timeout(20)
def test_eighty_billion_parameters_are_counted_without_allocating():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layers = build_gpt(vocab_size=32000, block_size=1024, num_layers=800, num_heads=32, width=2880)
    model = count_model(layers, tokens(1, 1024))
    assert 79e9 < model.parameters < 81e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB
