"""What layers take while they run, against memory that operators take on the host."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc.models import LayerSpec
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.memory.workspace import LiveBytes, Workspace, run_counting
from gpipe_hpc.planner.stages import count_stages


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (each[:, None] for each in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out((torch.softmax(q @ k.mT, -1) @ v)[:, 0])


class Head(nn.Module):
    """A linear layer with its cross-entropy: the logits are the largest of all."""

    def __init__(self, width, words):
        super().__init__()
        self.linear = nn.Linear(width, words, bias=False)

    def forward(self, x):
        logits = self.linear(x).flatten(0, -2)
        target = torch.zeros(len(logits), dtype=torch.long, device=x.device)
        return F.cross_entropy(logits, target)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(500, 16)

    def forward(self, x):
        return self.table((x[..., 0] * 0).long()) + x[..., :1] * 0


LAYERS = {
    "linear": (lambda: nn.Linear(64, 96), (32, 64)),
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), (32, 64)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (4, 3, 16, 16)),
    "attention": (lambda: Attention(32), (4, 24, 32)),
    "embedding": (Words, (8, 12, 4)),
    "head": (lambda: Head(16, 700), (4, 12, 16)),
}


class Allocated:
    """The bytes that torch's allocator gives out and takes back, in order, by its own profiler."""

    def __init__(self, run):
        activity = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity], profile_memory=True) as profiler:
            run()
        found = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        self.changes = [e.nbytes() for e in sorted(found, key=lambda e: e.start_ns())]

    @property
    def most(self):
        now = most = 0
        for change in self.changes:
            now += change
            most = max(most, now)
        return most

    @property
    def left(self):
        return sum(self.changes)


def measured(module, given):
    """Return the workspace of a layer that runs on the host, as `run_counting` defines it."""
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    held = []
    forward = Allocated(lambda: held.append(module(given)))
    output = held.pop()
    seed, edge = torch.ones_like(output), torch.autograd.graph.get_gradient_edge(output)
    del output
    backward = Allocated(lambda: torch.autograd.backward([edge], [seed]))
    return Workspace(forward.most - forward.left, backward.most)


@pytest.mark.parametrize("name", LAYERS)
def test_the_count_is_what_torchs_profiler_sees(name):
    make, shape = LAYERS[name]
    seen = measured(make(), torch.randn(shape, requires_grad=True).clone())
    module = make().to("meta")
    given = torch.empty(shape, device="meta", requires_grad=True).clone()
    counted = run_counting(lambda: module(given), module.parameters())
    # Kernels of the host take some bytes of their own: numbers of a row, a block of a product.
    # Those of a convolution take several times its output, which nobody asked to count here.
    for ours, theirs in zip(counted, seen, strict=True):
        assert ours <= 1.05 * theirs + 4096
        assert theirs <= 1.05 * ours + 4096 or name == "convolution"
    assert counted.backward > 0


def test_what_stood_there_before_is_not_counted_and_views_take_nothing():
    weight = torch.empty(10, 10, device="meta")
    live = LiveBytes()
    with live.above() as most:
        weight.t().add_(1)
        made = [weight + 1 for _ in range(3)]
        assert live.now == 3 * weight.nbytes
        made.clear()
        assert live.now == 0
    assert most() == 3 * weight.nbytes


def test_the_gradients_of_logits_are_what_the_last_stage_takes_most_for():
    """Logits, their gradient and that of the loss are there at once: more than is kept of them."""
    rows, width, words = 32, 8, 1000
    layers = [LayerSpec(nn.Linear, width, width), LayerSpec(nn.Linear, width, words, bias=False)]
    inputs = torch.empty(rows, width, device="meta")
    targets = torch.empty(rows, dtype=torch.long, device="meta")
    model = count_model(layers, inputs, targets, F.cross_entropy)
    first, last = (stage.workspace_bytes for stage in count_stages(model, [1, 1]))
    logits = rows * words * 4
    boundary = rows * width * 4
    assert last == pytest.approx(2 * logits, rel=0.1)
    assert first < 0.1 * last
    # A gradient that has come, one posted ahead, and that of the weight and its bias.
    assert first == 2 * boundary + 4 * (width * width + width)


def test_layers_without_a_gradient_take_only_what_their_forward_drops():
    given = torch.empty(16, 16, device="meta")
    assert run_counting(lambda: (given * 2).sum(), []) == Workspace(16 * 16 * 4, 0)
