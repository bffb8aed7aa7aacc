"""What reaches a layer or the loss of a micro-batch is its samples, whatever they are made of."""

import collections
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpipe_hpc import Pipeline, run_on_threads, whole
from gpipe_hpc.config import compose_config
from gpipe_hpc.errors import DataError, GpipeError, ModelError
from gpipe_hpc.verify.run import verify
from tests.support import losses as losses_of
from tests.support import mean_square

B, WIDTH = 8, 4


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = drawn(B, WIDTH), drawn(B, WIDTH, seed=1)
SIGNS = [-1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0, 1.0]
WORDS = ["minus" if sign < 0 else "plus" for sign in SIGNS]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class Signed(nn.Module):
    """Multiply each sample by its own sign, however that is written."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.linear, self.read = linear(), read

    def forward(self, batch: Any) -> Tensor:
        x, signs = self.read(batch)
        assert len(signs) == len(x), f"{len(signs)} signs for {len(x)} samples"
        signs = [-1.0 if sign == "minus" else 1.0 if sign == "plus" else sign for sign in signs]
        return self.linear(x) * torch.tensor(signs, dtype=torch.float64)[:, None]


def losses(
    read: Any, inputs: Any, targets: Any = Y, loss: Any = mean_square, microbatches=(1, 2, 4)
) -> list[float]:
    """Return the losses of one batch by numbers of micro-batches, of training and evaluation."""
    found = []
    for number in microbatches:
        for ranks in (1, 2):
            layers = [[Signed(read), nn.Tanh()] for _ in range(ranks)]

            def body(world, number=number, layers=layers):
                pipe = Pipeline(layers[world.rank], loss, microbatches=number, world=world)
                return pipe.step(inputs, targets).loss, pipe.evaluate(inputs, targets).loss

            found += [each for both in run_on_threads(ranks, body) for each in both]
    return found


def right() -> float:
    output = torch.tanh(linear()(X) * torch.tensor(SIGNS, dtype=torch.float64)[:, None])
    return float(mean_square(output, Y).detach())


class Encoding(collections.UserDict[str, Any]):
    """A mapping of a class of its own, as a BatchEncoding is."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


Named = collections.namedtuple("Named", ("x", "signs"))
INPUTS: dict[str, tuple[Any, Any]] = {
    "a list of texts": ((X, WORDS), lambda batch: batch),
    "a tuple of texts": ([X, tuple(WORDS)], lambda batch: batch),
    "texts first": ((WORDS, X), lambda batch: batch[::-1]),
    "numbers": ({"x": X, "signs": SIGNS}, lambda batch: (batch["x"], batch["signs"])),
    "a named tuple": (Named(X, WORDS), lambda batch: (batch.x, batch.signs)),
    "texts deep inside": (
        {"x": X, "more": {"kind": "signs", "signs": (WORDS, 1.0)}},
        lambda batch: (batch["x"], batch["more"]["signs"][0]),
    ),
    "a list of dicts": (
        (X, [{"sign": word} for word in WORDS]),
        lambda batch: (batch[0], [each["sign"] for each in batch[1]]),
    ),
    "a list of dicts of tensors": (
        (X, [{"sign": torch.full((n + 1, 2), sign)} for n, sign in enumerate(SIGNS)]),
        lambda batch: (batch[0], [float(each["sign"][0, 0]) for each in batch[1]]),
    ),
    "a list of tensors of any size": (
        (X, [torch.full((n + 2,), sign) for n, sign in enumerate(SIGNS)]),
        lambda batch: (batch[0], [float(each[0]) for each in batch[1]]),
    ),
    "a list of marked tensors": (
        (X, [whole(torch.full((B, 2), sign)) for sign in SIGNS]),
        lambda batch: (batch[0], [float(each[0, 0]) for each in batch[1]]),
    ),
    "arrays": ((X.numpy(), np.array(SIGNS)), lambda batch: (batch[0], batch[1].tolist())),
    "a mapping": (Encoding(x=X, signs=WORDS), lambda batch: (batch.x, batch["signs"])),
    "a mapping of arrays": (
        Encoding(x=X.numpy(), signs=np.array(SIGNS)),
        lambda batch: (batch.x, batch.signs.tolist()),
    ),
    "a mapping inside": (
        (X, Encoding(signs=WORDS), Encoding(kind="signs")),
        lambda batch: (batch[0], batch[1][batch[2].kind]),
    ),
    "a whole mapping": (
        (X, whole({"minus": -1.0, "plus": 1.0}), WORDS),
        lambda batch: (batch[0], [batch[1][word] for word in batch[2]]),
    ),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_a_loss_does_not_depend_on_the_number_of_microbatches(kind, caplog):
    inputs, read = INPUTS[kind]
    assert losses(read, inputs) == pytest.approx([right()] * 18, rel=1e-12)
    assert not caplog.records


@pytest.mark.parametrize(
    "inputs",
    [
        [[1.0] * (n % 3 + 1) for n in range(B)],
        tuple({"tokens": [1.0] * (n % 3 + 1)} for n in range(B)),
        ([[1.0] * (n % 3 + 1) for n in range(B)], WORDS),
        {"words": tuple(WORDS), "tokens": [[1.0] * B for n in range(B)]},
    ],
)
def test_lists_without_a_tensor_are_samples(inputs):
    class Count(nn.Module):
        def forward(self, nest: Any) -> Tensor:
            parts = list(nest.values()) if isinstance(nest, dict) else nest
            lists = (
                parts
                if isinstance(nest, tuple | dict) and type(parts[0]) in (list, tuple)
                else [parts]
            )
            (size,) = {len(each) for each in lists}
            return torch.full((size, 1), float(size))

    output = pipe_of(2, [Count()]).predict(inputs)
    assert output[:, 0].tolist() == [B / 2] * B


def test_a_list_of_equal_lists_without_a_tensor_is_refused():
    with pytest.raises(DataError, match="lists with one value per sample in a tuple or dict"):
        pipe_of(2).predict([WORDS, SIGNS])


def test_texts_alone_are_samples():
    table = {"minus": -1.0, "plus": 1.0}

    class Read(nn.Module):
        def forward(self, words: list[str]) -> Tensor:
            return torch.tensor([[table[word]] for word in words], dtype=torch.float64)

    layers = [Read(), nn.Linear(1, WIDTH, dtype=torch.float64)]
    expected = layers[1](torch.tensor(SIGNS, dtype=torch.float64)[:, None])

    def body(world):
        pipe = Pipeline(layers, mean_square, microbatches=4, world=world)
        return pipe.step(WORDS, Y).loss, pipe.predict(WORDS)

    for loss, output in run_on_threads(2, body):
        assert loss == pytest.approx(float(mean_square(expected, Y).detach()), rel=1e-12)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["dicts of tensors", "texts", "a list and a tensor", "marked"])
def test_the_loss_is_given_the_targets_of_its_samples(kind):
    targets: Any = {
        "dicts of tensors": [{"y": y[: n % 3 + 1]} for n, y in enumerate(Y)],
        "texts": [" ".join(map(repr, y.tolist())) for y in Y],
        "a list and a tensor": ([n % 3 + 1 for n in range(B)], Y),
        "marked": [whole({"y": y}) for y in Y],
    }[kind]

    def loss(output: Tensor, given: Any) -> Tensor:
        if kind == "dicts of tensors":
            given = [each["y"] for each in given]
        elif kind == "texts":
            given = [torch.tensor([float(y) for y in text.split()]) for text in given]
        elif kind == "a list and a tensor":
            given = [y[:n] for n, y in zip(*given, strict=True)]
        else:
            given = [each["y"] for each in given]
        assert len(given) == len(output)
        parts = [((o[: len(y)] - y) ** 2).sum() for o, y in zip(output, given, strict=True)]
        return torch.stack(parts).mean()

    found = losses(lambda batch: batch, (X, WORDS), targets, loss)
    assert found == pytest.approx([found[0]] * len(found), rel=1e-6)


class Masked(nn.Module):
    """Attention with a mask that is for all samples."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden, mask = batch
        return ((hidden @ hidden.transpose(1, 2) + mask).softmax(-1) @ hidden).mean(1)


MASKS = {
    "[1, S, S]": lambda mask: mask[None],
    "whole [S, S]": lambda mask: whole(mask),
    "whole array": lambda mask: whole(mask.numpy()),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("length", [B, 6])
def test_a_mask_goes_to_every_microbatch(length, kind, caplog):
    hidden, mask = drawn(B, length, WIDTH), torch.full((length, length), -1e9).triu(1).double()
    expected = Masked()((hidden, mask))
    inputs = (hidden, MASKS[kind](mask))
    for number in (1, 4, 8):

        def body(world, number=number):
            pipe = Pipeline(
                [Masked(), nn.Identity()], mean_square, microbatches=number, world=world
            )
            losses = pipe.step(inputs, Y).loss, pipe.evaluate(inputs, Y).loss
            return losses, pipe.predict(inputs)

        for losses, output in run_on_threads(2, body):
            assert losses == pytest.approx([float(mean_square(expected, Y))] * 2, rel=1e-12)
            torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert not caplog.records


def pipe_of(number: int = 4, layers: Any = None) -> Pipeline:
    return Pipeline(
        layers or [nn.Linear(4, 4)], lambda output, target: output.mean(), microbatches=number
    )


def test_a_square_mask_is_warned_of_once_by_its_name(caplog):
    pipe = pipe_of(B, [Masked()])
    inputs = (drawn(B, B, WIDTH), torch.zeros(B, B, dtype=torch.float64))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            pipe.step(inputs, Y)
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith("inputs[1]: its shape [8, 8]") and "gpipe_hpc.whole" in warning
    caplog.clear()
    pipe_of(1, [Masked()]).step(inputs, Y)  # nothing is cut
    assert not caplog.records


@pytest.mark.parametrize(
    ("inputs", "place"),
    [
        ((X, torch.zeros(6, 6)), r"inputs\[1\]"),
        ({"x": X, "lengths": torch.arange(B + 1)}, r'inputs\["lengths"\]'),
        ((X, {"more": [torch.zeros(3, 2)]}), r'inputs\[1\]\["more"\]\[0\]'),
        (Named(X, torch.zeros(5)), r"inputs\.signs"),
    ],
)
def test_a_tensor_of_another_first_dimension_is_refused_by_its_name(inputs, place):
    for number in (1, 4):
        with pytest.raises(GpipeError, match=rf"{place}: expected 8 samples.*gpipe_hpc\.whole"):
            pipe_of(number).step(inputs, Y)


def test_lists_of_tensors_are_several_inputs_as_ever(caplog):
    class Sum(nn.Module):
        def forward(self, nest: Any) -> Tensor:
            x, (more, [scale, name]) = nest
            assert name == "scale" and more.shape == x.shape
            return (x + more) * scale

    for x in (X, X[:2]):
        inputs = [x, (x * 2, [torch.tensor(3.0), "scale"])]
        pipe = pipe_of(2, [Sum()])
        torch.testing.assert_close(pipe.predict(inputs), x * 9)
        torch.testing.assert_close(pipe.predict([x, (x * 2, [torch.tensor(3.0), "scale"])]), x * 9)
    assert not caplog.records


def test_a_list_that_may_be_samples_or_inputs_is_warned_of_or_refused(caplog):
    class First(nn.Module):
        def forward(self, nest: Any) -> Tensor:
            return nest[0]

    x = X[:2]
    pipe = pipe_of(2, [First()])
    with caplog.at_level(logging.WARNING):
        pipe.predict((x, [x, x]))
        pipe.predict((x, [224, 224]))
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["inputs[1]"]
    with pytest.raises(DataError, match=r"inputs\[1\]: a list of 2 entries.*gpipe_hpc\.whole"):
        pipe.predict((x, [torch.zeros(1, 3), torch.zeros(2, 3)]))


def test_a_list_that_was_seen_to_be_samples_is_not_in_doubt_later(caplog):
    class First(nn.Module):
        def forward(self, nest: Any) -> Tensor:
            assert len(nest[0]) == len(nest[1])
            return nest[0]

    pipe = pipe_of(2, [First()])
    for size in (B, 2):
        pipe.predict((X[:size], WORDS[:size]))
    assert not caplog.records


def test_a_sequence_of_another_class_is_warned_of(caplog):
    class First(nn.Module):
        def forward(self, nest: Any) -> Tensor:
            return nest[0]

    with caplog.at_level(logging.WARNING):
        pipe_of(2, [First()]).predict((X, range(B)))
    assert "inputs[1]: a range of 8 values" in caplog.text


def test_what_made_the_batch_is_not_trained_which_is_warned_of_once(caplog):
    made = X.clone().requires_grad_() * 2
    expected = linear()
    mean_square(expected(made.detach()), Y).backward()
    layers = [linear()]
    pipe = Pipeline(layers, mean_square, microbatches=4)
    with caplog.at_level(logging.WARNING):
        pipe.predict(made)
        pipe.evaluate(made, Y)
        assert not caplog.records
        for _ in range(2):
            pipe.step(made, Y)
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith("inputs: requires a gradient") and "inputs.detach()" in warning
    torch.testing.assert_close(layers[0].weight.grad, expected.weight.grad, rtol=1e-12, atol=1e-12)


def test_one_tensor_given_twice_stays_one():
    class Writes(nn.Module):
        def forward(self, pair: Any) -> Tensor:
            one, other = pair
            one.mul_(3.0)
            return one + other

    x = X.clone()
    torch.testing.assert_close(pipe_of(4, [Writes()]).predict((x, x)), X * 6)
    torch.testing.assert_close(x, X)


def test_a_batch_without_samples_and_uneven_ones():
    inputs = (X[:3], WORDS[:3], whole(torch.zeros(5, 5)))

    class First(nn.Module):
        def forward(self, batch: Any) -> Tensor:
            assert len(batch[0]) == len(batch[1]) and batch[2].shape == (5, 5)
            return batch[0]

    pipe = pipe_of(2, [First()])
    torch.testing.assert_close(pipe.predict(inputs), X[:3])
    assert pipe.predict((X[:0], [], whole(torch.zeros(5, 5)))) is None


def test_a_jagged_batch_is_cut_by_samples():
    parts = [drawn(n % 3 + 1, WIDTH, seed=n) for n in range(B)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)

    class Mean(nn.Module):
        def forward(self, nested: Tensor) -> Tensor:
            return torch.stack([part.mean(0) for part in nested.unbind()])

    expected = torch.stack([part.mean(0) for part in parts])
    for number in (1, 3, 8):
        torch.testing.assert_close(pipe_of(number, [Mean()]).predict(jagged), expected)


class Returns(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x[:, None].expand(-1, 5, -1).transpose(0, 1), r"output 0 of micro-batch 0"),
        (lambda x: (x, x.sum(0)), r"output 1 of micro-batch 0 has shape \[4\]"),
        (lambda x: x[:, : 2 + int(x[0, 0] > 0)], r"shape .* along the first dimension"),
        (lambda x: (x,) * (2 + int(x[0, 0] > 0)), r"differ in their tuples, lists or dicts"),
    ],
)
def test_outputs_that_cannot_be_put_together_are_refused_by_name(make, words, ranks):
    def body(world):
        layers = [nn.Identity(), Returns(make)]
        pipe = Pipeline(layers, mean_square, microbatches=4, world=world)
        with pytest.raises(ModelError, match=rf"layers\.1 \(Returns\).*{words}"):
            pipe.predict(X)

    run_on_threads(ranks, body)


SCALED = Returns(lambda x: 2 * x)
SQUARES = {
    "products": ([Returns(lambda x: x @ x.T)], 4, True),
    "in a dict": ([Returns(lambda x: {"x": x, "products": x @ x.T})], 4, True),
    "activated": ([Returns(lambda x: x @ x.T), nn.Softmax(1)], 4, True),
    "in one piece": ([Returns(lambda x: x @ x.T)], 1, False),
    "classes": ([nn.Linear(WIDTH, 2).double()], 4, False),
    "classes, activated": ([nn.Linear(WIDTH, 2).double(), nn.Tanh(), nn.LogSoftmax(1)], 4, False),
    "classes, scaled": ([Returns(torch.tanh), nn.Linear(WIDTH, 2).double(), SCALED], 4, False),
    "others": ([Returns(lambda x: x[:, :3])], 4, False),
    "one number": ([Returns(lambda x: x[:, :1])], 8, False),
    "sequences": ([Returns(lambda x: x[:, :2, None])], 4, False),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", SQUARES)
def test_outputs_that_may_be_of_pairs_of_samples_are_warned_of_once(kind, ranks, caplog):
    layers, microbatches, warns = SQUARES[kind]

    def body(world):
        model = [nn.Identity(), *layers]
        pipe = Pipeline(model, mean_square, microbatches=microbatches, world=world)
        return [pipe.predict(X) for _ in range(2)]

    run_on_threads(ranks, body)
    found = [record.getMessage() for record in caplog.records]
    assert ["microbatches=1" in each and "shape [2, 2]" in each for each in found] == [True] * warns


def test_an_output_that_need_not_be_put_together_is_as_it_is():
    for output in run_on_threads(
        2,
        lambda world: Pipeline(
            [nn.Identity(), Returns(lambda x: x.T)], mean_square, microbatches=1, world=world
        ).predict(X),
    ):
        torch.testing.assert_close(output, X.T)


def test_outputs_with_a_value_for_each_sample_become_one_list():
    def body(world):
        layers = [nn.Identity(), Returns(lambda x: {"words": [str(v) for v in x[:, 0]], "x": x})]
        return Pipeline(layers, mean_square, microbatches=3, world=world).predict(X)

    for output in run_on_threads(2, body):
        assert output["words"] == [str(v) for v in X[:, 0]]
        torch.testing.assert_close(output["x"], X)


MIXING = """
import torch
from torch import nn


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Apart(nn.Module):
    def forward(self, x):
        return x - 1.0


def build(mixes):
    return [nn.Linear(16, 16), Centred() if mixes else Apart(), nn.Linear(16, 4)]
"""


@pytest.mark.parametrize("mixes", [True, False])
def test_verify_names_a_layer_that_makes_the_loss_depend_on_the_cut(mixes, tmp_path, monkeypatch):
    (tmp_path / "mixing_layers.py").write_text(MIXING)
    monkeypatch.syspath_prepend(str(tmp_path))
    report = verify(
        compose_config(
            [
                "data=synthetic_vectors", "data.width=16", "data.num_classes=4", "model=mlp",
                "model._target_=mixing_layers.build", f"model.mixes={mixes}",
                "train.batch_size=8", "pipeline.microbatches=2", "pipeline.replicas=2",
                "pipeline.partition=uniform", "verify.steps=1",
            ]
        )
    )  # fmt: skip
    assert report.is_same, str(report)
    depends = "The loss of an evaluation depends on the number of micro-batches"
    assert (depends in str(report)) == mixes
    assert ("The first layer that depends on it is layers.1 (Centred)" in str(report)) == mixes


OWN = """
import torch
from torch import nn

from gpipe_hpc import LayerSpec, whole


class Items:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        target = {"y": torch.randn(index % 4 + 1, generator=drawn)}
        return torch.randn(6, 4, generator=drawn), "minus" if index % 3 else "plus", target


def collate(items):
    x, words, targets = zip(*items)
    mask = torch.full((6, 6), -1e9).triu(1)
    return {"x": torch.stack(x), "words": words, "mask": whole(mask)}, list(map(whole, targets))


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch):
        x, words = batch["x"], batch["words"]
        sign = torch.tensor([1.0 if word == "plus" else -1.0 for word in words])
        hidden = self.linear(x) * sign[:, None, None]
        hidden = (hidden @ hidden.transpose(1, 2) + batch["mask"]).softmax(-1) @ hidden
        return hidden, hidden, hidden[:, :3]


class Second(nn.Module):
    def forward(self, parts):
        one, other, view = parts
        view = view.sum(1, keepdim=True)
        return one * 0.5 + view if one is other else one


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden):
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: -2 * gradient)
        return self.linear(hidden.mean(1))


def build():
    return [LayerSpec(First), LayerSpec(Second), LayerSpec(Last)]


def loss(output, targets):
    pairs = zip(output, targets, strict=True)
    return torch.stack([(o[: len(t["y"])] - t["y"]).square().mean() for o, t in pairs]).mean()
"""


@pytest.mark.slow
def test_processes_train_on_such_batches_as_one_does(train, tmp_path):
    (tmp_path / "own_batches.py").write_text(OWN)
    settings = (
        *("data=own", "data._target_=own_batches.Items", "data.collate=own_batches.collate"),
        *("model=own", "model._target_=own_batches.build", "loss._target_=own_batches.loss"),
        *("data.validation_fraction=0", "train.batch_size=8", "train.steps=3", "train.seed=0"),
        *("lr.warmup_steps=0", "optimizer.lr=0.05"),
    )
    found = []
    for ranks, microbatches in ((1, 1), (2, 4)):
        run = tmp_path / f"run{ranks}"
        pipeline = (f"run.dir={run}", f"pipeline.microbatches={microbatches}")
        env = {"PYTHONPATH": str(tmp_path)}
        train(ranks, *settings, *pipeline, "pipeline.recompute=always", env=env)
        found.append(losses_of(run))
    assert len(found[0]) == 3
    assert found[1] == pytest.approx(found[0], rel=1e-4)
