"""State that forwards change: once a micro-batch, whatever is recomputed; R sees what F saw.

The reference is a plain loop that runs forward and backward of one micro-batch after the other.
Buffers are compared as well as losses and gradients.
"""

import copy

import torch
from torch import nn

from tests.support import (
    Trained,
    assert_close,
    batches,
    descend,
    in_turn,
    square_sum,
    together,
    train_ranks,
)

WIDTH, SAMPLES, STEPS, RATE = 4, 11, 3, 0.1
LARGE = 10_000  # so many numbers for each of the width are not copied beforehand


class Averaged(nn.Linear):
    """Centre by an average that moves in place."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x - self.average)


class Reassigned(nn.Linear):
    """Centre by an average that is another tensor after each forward: no version moves."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return super().forward(x - self.average)


class Counter(nn.Linear):
    """Scale by the number of forwards so far."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count += 1
        return super().forward(x) * (1 + self.count)


class SavedInPlace(nn.Linear):
    """Multiply by a buffer that autograd saves, and that the next forward writes into."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        self.scale.mul_(0.7).add_(x.detach().abs().mean(0), alpha=0.1)
        return super().forward(x) * self.scale


class ThroughData(nn.Linear):
    """Move a large and a small buffer in a way that their versions do not tell."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("small", torch.ones(WIDTH))
        self.register_buffer("large", torch.ones(WIDTH * LARGE))

    def forward(self, x):
        self.small.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.large.data = self.large.data * 0.9 + 0.1 * x.detach().abs().mean()
        return super().forward(x - self.small) * self.large[:WIDTH]


class ReplacedBesideItsCopy(nn.Linear):
    """Have an attribute that holds the first of many tensors that take a buffer's place."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        if not hasattr(self, "first"):
            self.first = self.scale
        self.scale = self.scale + x.detach().abs().mean(0)
        return super().forward(x) * self.scale - 0 * self.first


class Large(nn.Linear):
    """Move a large buffer, with what autograd saves of it."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("large", torch.ones(WIDTH * LARGE))

    def forward(self, x):
        self.large.mul_(0.9).add_(0.1 * x.detach().abs().mean())
        return super().forward(x) * self.large[:WIDTH]


class MadeOnTheWay(nn.Linear):
    """Have no buffer until the first forward makes one."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        if not hasattr(self, "first"):
            self.register_buffer("first", x.detach().mean(0))
        else:
            self.first = self.first + 0.1
        return super().forward(x - self.first)


class Started(nn.Linear):
    """Take a buffer's value from the first data that comes, and leave it alone from then on."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x):
        if not self.is_set:
            self.centre.copy_(x.detach().mean(0))
            self.is_set.fill_(True)
        return super().forward(x - self.centre)


class Late(nn.Linear):
    """Leave the buffer alone for five forwards, then move it."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("late", torch.ones(WIDTH))

    def forward(self, x):
        self.count += 1
        if self.count > 5:
            self.late.mul_(1.5)
        return super().forward(x) * self.late[:WIDTH]


class Shared(nn.Module):
    """Two modules that hold one buffer: what one writes the other reads."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Averaged(), Averaged()
        self.second.average = self.first.average

    def forward(self, x):
        return self.second(self.first(x))


def spectral():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def spectral_by_hook():
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


def nested():
    return nn.Sequential(nn.Tanh(), nn.Sequential(Averaged(), Counter()))


KINDS = {
    "averaged": Averaged,
    "reassigned": Reassigned,
    "counter": Counter,
    "saved": SavedInPlace,
    "spectral": spectral,
    "spectral-hook": spectral_by_hook,
    "nested": nested,
    "lazy": MadeOnTheWay,
    "started": Started,
    "late": Late,
    "shared": Shared,
    "data": ThroughData,
    "large": Large,
    "replaced": ReplacedBesideItsCopy,
}


def model(kind, num_layers=4):
    torch.manual_seed(3)
    layers = [part for _ in range(num_layers) for part in (kind(), nn.Tanh())]
    return [layer.double() for layer in [*layers, nn.Linear(WIDTH, 2)]]


BATCHES = batches(STEPS, SAMPLES, WIDTH, 2)


def train_plain(layers, microbatches, loss_fn=square_sum):
    """Return losses, gradients of each step, and buffers, by a plain loop."""
    whole = nn.Sequential(*copy.deepcopy(layers))
    trained = Trained()
    for inputs, targets in BATCHES:
        whole.zero_grad()
        total = 0.0
        for x, y in zip(
            inputs.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True
        ):
            loss, _ = loss_fn(whole(x), y)
            (loss / SAMPLES).backward()
            total += loss.item() / SAMPLES
        trained.losses.append(total)
        trained.gradients.append(
            {f"layers.{n}": p.grad.clone() for n, p in whole.named_parameters()}
        )
        descend(whole.parameters(), RATE)
    trained.buffers = {f"layers.{n}": b for n, b in whole.named_buffers()}
    return trained


def train(layers, ranks, microbatches, loss_fn=square_sum, **options):
    """Return the same of a pipeline, put together from its ranks."""
    options |= {"microbatches": microbatches, "rate": RATE}
    return together(train_ranks(layers, loss_fn, BATCHES, ranks=ranks, **options))


LAYOUTS = [
    (2, {"schedule": "gpipe", "recompute": "always"}),
    (2, {"schedule": "gpipe", "recompute": "except_last"}),
    (3, {"schedule": "gpipe", "recompute": "never"}),
    (2, {"schedule": "one_f_one_b", "recompute": "always"}),
    (2, {"schedule": "one_f_one_b", "recompute": "except_last"}),
    (2, {"schedule": "zb_h1", "recompute": "always"}),
    (2, {"schedule": "zb_h1", "recompute": "never"}),
    (2, {"schedule": "interleaved", "recompute": "except_last"}),
    (1, {"schedule": "gpipe", "recompute": "always", "offload": True}),
    (1, {"schedule": "gpipe", "recompute": "never", "offload": True}),
]


@in_turn("kind, layout", [*KINDS], LAYOUTS, each=3)
def test_trains_as_the_plain_loop(kind, layout):
    """Averages were moved by R as well, and under 1F1B even losses were others."""
    ranks, options = layout
    layers = model(KINDS[kind])
    assert_close(train(layers, ranks, 4, **options), train_plain(layers, 4), 1e-10)
