"""Random models, partitions and layouts train bitwise as the plain loop."""

import itertools
from functools import partial

import torch
from hypothesis import HealthCheck, given, note, reject, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline

WIDTH = 8
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
SGD = partial(torch.optim.SGD, lr=0.05)


def main_of(nest):
    """Return the tensor of a stage boundary that every layer transforms."""
    if isinstance(nest, dict):
        return nest["x"]
    return nest[0] if isinstance(nest, tuple) else nest


def with_main(nest, x):
    if isinstance(nest, dict):
        return nest | {"x": x}
    return (x, *nest[1:]) if isinstance(nest, tuple) else x


class On(nn.Module):
    """Apply a module to the main tensor and pass on the other values."""

    def __init__(self, make, *args):
        super().__init__()
        self.inner = make(*args)

    def forward(self, nest):
        return with_main(nest, self.inner(main_of(nest)))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1, dtype=torch.float64)

    def forward(self, x):
        return self.conv(x.view(-1, 2, 4)).view(-1, WIDTH)


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.requires_grad_(False)


class HalfFrozen(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.bias.requires_grad_(False)


class Unused(nn.Linear):
    """Linear layer with an unused parameter, and one that only odd-sized micro-batches use."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.never = nn.Parameter(torch.zeros(3))
        self.sometimes = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        x = super().forward(x)
        return x * self.sometimes if len(x) % 2 else x


class Pack(nn.Module):
    """Return all kinds of values that a stage boundary may contain; some depend on the data."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, nest):
        x = main_of(nest)
        extra = {
            "skip": x * 0.5,
            "cut_off": x.detach() * 0.25,
            "mask": x > 0,
            "order": x.detach().argsort(-1),
            "nothing": None,
            "flag": bool(x.detach().sum() > 0),
            "count": int(x.detach().abs().sum()),
            "nobody_wants": x.sum(),
        }
        if self.kind == "tuple":
            return (x, extra, None, True)
        return {"x": x, **extra} if self.kind == "dict" else {"x": x, "inside": [extra, (3,)]}


class Unpack(nn.Module):
    """Use the values of `Pack` and return one tensor."""

    def forward(self, nest):
        x = main_of(nest)
        if not isinstance(nest, dict | tuple):
            return x
        extra = nest[1] if isinstance(nest, tuple) else nest
        extra = extra["inside"][0] if "inside" in extra else extra
        assert extra["nothing"] is None
        x = x + extra["skip"] + extra["cut_off"].gather(-1, extra["order"])
        x = x * torch.where(extra["mask"], 1.0, 0.5)
        return x / (1 + extra["count"]) if extra["flag"] else -x


class WriteInto(nn.Module):
    """Modify the container of the input and return it."""

    def forward(self, nest):
        if isinstance(nest, dict):
            nest["x"] = nest["x"] * 0.5
        return nest


class Embed(nn.Embedding):
    def __init__(self):
        super().__init__(5, WIDTH, dtype=torch.float64)


def row_sum_loss(nest, targets):
    """Return the loss of the row sums of samples with positive target, and their number."""
    counts = (targets > 0).double()
    return ((main_of(nest).sum(1) - targets) ** 2 * counts).sum(), counts.sum()


def elementwise_loss(nest, targets):
    """Return the loss of all elements of these samples, so that gradients within a row differ.

    The gradient of a sum is one number for a whole row. In one process it stays expanded, and
    cuBLAS has other kernels for that than for a received gradient: on an H200, 78 of 180 matrix
    products differed.
    """
    counts = (targets > 0).double()
    return ((main_of(nest) - targets[:, None]) ** 2 * counts[:, None]).sum(), counts.sum()


@st.composite
def models(draw, plain):
    """Draw a model; its first layer takes float64[n, 8], or int64[n] if it is an Embed."""
    in_place = plain.Recipe(On, (nn.ReLU, True))
    linear = plain.Recipe(On, (partial(nn.Linear, dtype=torch.float64), WIDTH, WIDTH))
    choices = [
        linear,
        in_place,
        plain.Recipe(On, (partial(nn.LayerNorm, dtype=torch.float64), WIDTH)),
        plain.Recipe(On, (Conv,)),
        plain.Recipe(On, (Frozen,)),
        plain.Recipe(On, (HalfFrozen,)),
        plain.Recipe(On, (Unused,)),
        plain.Recipe(On, (nn.Dropout, 0.4)),
        plain.Recipe(nn.Identity, ()),
        plain.Recipe(Pack, ("tuple",)),
        plain.Recipe(Pack, ("dict",)),
        plain.Recipe(Pack, ("nested",)),
        plain.Recipe(Unpack, ()),
        plain.Recipe(WriteInto, ()),
    ]
    layers = draw(st.lists(st.sampled_from(choices), min_size=1, max_size=7))
    first = draw(st.sampled_from([linear, in_place, plain.Recipe(Embed, ())]))
    return [first, *layers]


@st.composite
def layouts(draw, num_layers):
    stages = draw(st.integers(1, 4))
    cuts = draw(st.lists(st.integers(0, num_layers), min_size=stages - 1, max_size=stages - 1))
    edges = [0, *sorted(cuts), num_layers]
    return {
        "partition": [b - a for a, b in itertools.pairwise(edges)],
        "stages": stages,
        "replicas": draw(st.integers(1, 2)),
        "microbatches": draw(st.integers(1, 4)),
        "schedule": draw(st.sampled_from(["gpipe", "one_f_one_b"])),
        "recompute": draw(st.sampled_from(["always", "except_last", "never"])),
    }


def make_batches(sizes, embeds):
    generator = torch.Generator().manual_seed(sum(sizes))
    batches = []
    for size in sizes:
        inputs = torch.randn(size, WIDTH, dtype=torch.float64, generator=generator)
        if embeds:
            inputs = torch.randint(0, 5, (size,), generator=generator)
        targets = torch.randint(-1, 3, (size,), generator=generator).double()
        batches.append((inputs, targets))
    return batches


def cut_clones(batch, pieces):
    """Split a batch into copies, because in-place layers of the plain loop modify the data."""
    return [piece.clone() for piece in torch.tensor_split(batch, pieces)]


@QUICK
@given(data=st.data())
def test_random_model_in_random_layout_equals_plain_loop(plain, data):
    recipes = data.draw(models(plain), label="model")
    layout = data.draw(layouts(len(recipes)), label="layout")
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3), label="batch sizes")
    batches = make_batches(sizes, recipes[0].factory is Embed)
    given_data = [inputs.clone() for inputs, _ in batches]
    forwards = layout["microbatches"]
    loss_fn = elementwise_loss if plain.device.is_accelerator else row_sum_loss
    order = range(forwards - 1, -1, -1) if layout["schedule"] == "gpipe" else range(forwards)
    try:
        expected = plain.train(
            recipes,
            loss_fn,
            batches,
            seed=3,
            replicas=layout["replicas"],
            microbatches=forwards,
            order=lambda _: order,
            optimizer=SGD if any(True for _ in parameters_of(plain, recipes)) else None,
            cut=cut_clones,
        )
    except RuntimeError as error:
        # Some in-place writes destroy values that autograd needs, in one process as well.
        assert "modified by an inplace operation" in str(error)
        reject()

    def body(world):
        pipe = Pipeline(
            [LayerSpec(factory, *args) for factory, args in recipes],
            loss_fn,
            seed=3,
            world=world,
            **layout,
        )
        return plain.train_rank(pipe, batches, optimizer=SGD)

    ranks = plain.on_threads(layout["stages"] * layout["replicas"], body)
    differences = plain.unite(ranks, layout["stages"]).differences(expected)
    note(f"differences: {differences}")
    assert differences == []
    assert all(torch.equal(a, b) for a, (b, _) in zip(given_data, batches, strict=True))


def parameters_of(plain, recipes):
    for layer in plain.build(recipes, 0):
        yield from layer.parameters()
