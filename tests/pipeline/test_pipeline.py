"""Guarantees of `Pipeline` besides correct gradients, which tests/engine tests."""

import copy
import inspect
import re

import numpy as np
import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import ActionError, ConfigError, DataError
from gpipe_hpc.schedule import build, lower
from tests.support import batch, linears, mean_square

WIDTH = 4


@pytest.fixture
def without_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def test_single_process_needs_no_launcher(without_launcher):
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
    plain = copy.deepcopy(model)
    inputs, targets = batch(7)
    pipe = Pipeline(model, mean_square, microbatches=3)
    result = pipe.step(inputs, targets)
    loss = mean_square(plain(inputs), targets)
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    for ours, parameter in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, parameter.grad)
    assert (pipe.replica, pipe.stage_rank, pipe.share(7)) == (0, 0, slice(0, 7))


def test_stages_default_to_world_size_over_replicas():
    def body(world):
        pipe = Pipeline(linears(3), mean_square, replicas=2, world=world)
        return pipe.replica, pipe.stage_rank, pipe.mesh.stages

    assert run_on_threads(4, body) == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]


@pytest.mark.parametrize("size", [0, 1, 5, 6, 17])
def test_shares_follow_tensor_split_of_the_global_batch(size):
    def body(world):
        pipe = Pipeline(linears(1), mean_square, replicas=2, microbatches=3, world=world)
        return pipe.share(size)

    samples = torch.arange(size)
    pieces = samples.tensor_split(6)
    shares = [samples[part] for part in run_on_threads(2, body)]
    assert [s.tolist() for s in shares] == [
        torch.cat(pieces[:3]).tolist(),
        torch.cat(pieces[3:]).tolist(),
    ]


def test_only_first_and_last_stage_need_data():
    inputs, targets = batch()

    def body(world):
        pipe = Pipeline(linears(3), mean_square, microbatches=2, world=world)
        data = inputs if pipe.needs_inputs else None, targets if pipe.needs_targets else None
        losses = [pipe.step(*data).loss, pipe.step(inputs, targets).loss]
        losses.append(pipe.evaluate(*data).loss)
        return pipe.needs_inputs, pipe.needs_targets, losses

    first, middle, last = run_on_threads(3, body)
    assert first[:2] == (True, False) and middle[:2] == (False, False) and last[:2] == (False, True)
    assert len(set(first[2])) == 1 and first[2] == middle[2] == last[2]


def test_parameter_names_are_global_and_cover_the_model():
    layers = [*linears(2), LayerSpec(nn.Identity), LayerSpec(nn.LayerNorm, WIDTH)]

    def body(world):
        pipe = Pipeline(layers, mean_square, partition=[1, 1, 1, 1], world=world)
        pipe.step(*batch())
        return [name for name, _ in pipe.named_parameters()], pipe.parameters()

    ranks = run_on_threads(4, body)
    assert [names for names, _ in ranks] == [
        ["layers.0.weight", "layers.0.bias"],
        ["layers.1.weight", "layers.1.bias"],
        [],
        ["layers.3.weight", "layers.3.bias"],
    ]
    assert ranks[2][1] == []


@pytest.mark.parametrize("stages", [1, 4])
def test_training_keeps_the_random_state_of_the_user(stages):
    """Regression: ranks on threads restored each other's seeds at the end of a step."""
    layers = [LayerSpec(nn.Dropout, 0.5), *linears(3)]

    def body(world):
        pipe = Pipeline(layers, mean_square, microbatches=4, world=world)
        for _ in range(10):
            pipe.step(*batch())
        pipe.evaluate(*batch())
        pipe.predict(batch()[0])

    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    run_on_threads(stages, body)
    assert torch.equal(torch.rand(4), expected)


def test_train_and_eval_modes_set_by_the_user_are_kept():
    inputs, targets = torch.ones(64, WIDTH), torch.zeros(64, WIDTH)
    dropout = nn.Dropout(0.5)
    frozen = nn.BatchNorm1d(WIDTH).eval()

    def body(world):
        pipe = Pipeline([frozen, dropout], mean_square, microbatches=2, world=world)
        losses = [pipe.step(inputs, targets).loss, pipe.evaluate(inputs, targets).loss]
        assert dropout.training and not frozen.training
        dropout.eval()
        losses.append(pipe.step(inputs, targets).loss)
        assert pipe.predict(inputs).mean().item() == pytest.approx(1.0, abs=1e-4)
        assert not dropout.training
        return losses

    ((trained, evaluated, without),) = run_on_threads(1, body)
    assert evaluated == without == pytest.approx(1.0, abs=1e-4)
    assert abs(trained - 1.0) > 1e-2
    assert frozen.running_mean.tolist() == [0.0] * WIDTH


def test_unequal_replicas_get_the_weights_of_replica_0():
    def body(world):
        generator = torch.Generator().manual_seed(world.rank)
        layer = nn.BatchNorm1d(WIDTH)
        for tensor in (layer.weight.data, layer.running_mean):
            tensor.copy_(torch.randn(WIDTH, generator=generator))
        before = layer.weight.detach().clone()
        Pipeline([layer], mean_square, replicas=3, world=world)
        return before, layer.weight.detach(), layer.running_mean

    ranks = run_on_threads(3, body)
    assert not torch.equal(ranks[0][0], ranks[1][0])
    for _, weight, mean in ranks:
        assert torch.equal(weight, ranks[0][0]) and torch.equal(mean, ranks[0][2])


def test_initial_weights_depend_on_seed_and_layer_not_on_partition():
    def weights(size, **settings):
        def body(world):
            pipe = Pipeline(linears(4), mean_square, world=world, **settings)
            return {name: p.detach() for name, p in pipe.named_parameters()}

        return {name: p for rank in run_on_threads(size, body) for name, p in rank.items()}

    one, two = weights(1, seed=9), weights(2, seed=9, partition=[3, 1])
    other = weights(1, seed=10)
    assert one.keys() == two.keys() == other.keys() and len(one) == 8
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["layers.0.weight"], one["layers.1.weight"])


def test_built_module_keeps_its_weights():
    layer = nn.Linear(WIDTH, WIDTH)
    weight = layer.weight.detach().clone()
    run_on_threads(1, lambda world: Pipeline([layer], mean_square, world=world) and None)
    assert torch.equal(layer.weight, weight)


def test_evaluation_and_prediction_change_no_state():
    inputs, targets = batch()

    def body(world):
        layers = [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))]
        pipe = Pipeline(layers, mean_square, microbatches=2, world=world)
        pipe.step(inputs, targets)
        tensors = [*pipe.parameters(), *(p.grad for p in pipe.parameters()), *layers[1].buffers()]
        before = [t.detach().clone() for t in tensors]
        losses = {pipe.evaluate(inputs, targets).loss for _ in range(2)}
        pipe.predict(inputs)
        assert len(losses) == 1 and pipe.steps_done == 1
        return [torch.equal(t, b) for t, b in zip(tensors, before, strict=True)]

    assert all(all(same) for same in run_on_threads(2, body))


def test_evaluation_and_prediction_work_in_inference_mode():
    """Regression: evaluation failed, as inference tensors have no version counter."""
    inputs, targets = batch()

    def body(world):
        pipe = Pipeline(linears(4), mean_square, microbatches=2, world=world)
        with torch.inference_mode():
            inside = pipe.evaluate(inputs.clone(), targets).loss, pipe.predict(inputs.clone())
        assert inside[0] == pipe.evaluate(inputs, targets).loss == pipe.step(inputs, targets).loss
        return torch.equal(inside[1], pipe.predict(inputs))

    assert run_on_threads(2, body) == [True, True]


def test_step_in_inference_mode_gives_the_same_gradients():
    inputs, targets = batch()

    def body(world):
        pipe = Pipeline(linears(4), mean_square, microbatches=2, replicas=2, world=world)
        part = pipe.share(len(inputs))
        pipe.step(inputs[part], targets[part])
        expected = [p.grad.clone() for p in pipe.parameters()]
        with torch.inference_mode():
            pipe.step(inputs[part].clone(), targets[part].clone())
        return [torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), expected, strict=True)]

    assert all(all(same) for same in run_on_threads(2, body))


def test_loss_without_a_graph_raises():
    inputs, targets = batch()
    pipe = Pipeline(linears(2), lambda o, t: mean_square(o, t).detach(), microbatches=2)
    with pytest.raises(ActionError, match=r"action 0[FR].*loss_fn: the loss .* has no graph"):
        pipe.step(inputs, targets)
    pipe.evaluate(inputs, targets)


def test_clipping_to_a_negative_norm_raises():
    pipe = Pipeline(linears(2), mean_square, microbatches=2)
    pipe.step(*batch())
    with pytest.raises(ConfigError, match=r"clip_grad_norm_: max_norm must be 0 or more"):
        pipe.clip_grad_norm_(-1.0)


def test_loss_without_a_graph_is_allowed_if_nothing_trains():
    inputs, targets = batch()
    without = [nn.Tanh(), nn.Tanh()]
    assert Pipeline(without, mean_square, microbatches=2).step(inputs, targets).loss > 0
    nothing = Pipeline(linears(2), lambda o, t: (torch.zeros(()), 0.0), microbatches=2)
    assert nothing.step(inputs, targets).loss == 0


def test_predictions_keep_input_order_on_every_rank_of_a_replica():
    inputs = torch.arange(7.0).view(7, 1)

    class Describe(nn.Module):
        def forward(self, x):
            return {"twice": 2 * x, "size": len(x), "sum": x.sum(), "none": None}

    def body(world):
        pipe = Pipeline(
            [nn.Identity(), Describe()], mean_square, replicas=2, microbatches=2, world=world
        )
        return pipe.predict(inputs[pipe.share(7)])

    ranks = run_on_threads(4, body)
    for rank, first, second in ((0, [0.0, 1.0], [2.0, 3.0]), (2, [4.0, 5.0], [6.0])):
        for got in ranks[rank : rank + 2]:
            assert got["twice"].flatten().tolist() == [2 * x for x in first + second]
            assert got["size"] == [len(first), len(second)]
            assert got["sum"].tolist() == [sum(first), sum(second)]
            assert got["none"] is None and not got["twice"].requires_grad


@pytest.mark.parametrize("make", [lambda table: table, lower], ids=["bare", "lowered"])
def test_schedule_may_be_a_table(make):
    table = make(build("one_f_one_b", ranks=2, microbatches=3))

    def run(schedule):
        def body(world):
            pipe = Pipeline(
                linears(2),
                mean_square,
                microbatches=3,
                schedule=schedule,
                recompute="never",
                world=world,
            )
            return pipe.step(*batch()).loss, [p.grad.clone() for p in pipe.parameters()]

        return run_on_threads(2, body)

    for (loss, gradients), (named_loss, named) in zip(run(table), run("one_f_one_b"), strict=True):
        assert loss == named_loss
        assert all(torch.equal(a, b) for a, b in zip(gradients, named, strict=True))


def test_inputs_and_targets_may_be_nested():
    class Add(nn.Module):
        def forward(self, nest):
            return nest["a"] * nest["scale"] + nest["rest"][0]

    def loss_fn(output, target):
        return mean_square(output, target["y"] if target["use"] else output)

    ones = torch.ones(6, WIDTH)
    inputs = {"a": ones, "scale": torch.tensor(3.0), "rest": (ones, "text")}

    def body(world):
        pipe = Pipeline([Add(), nn.Identity()], loss_fn, microbatches=4, world=world)
        result = pipe.step(inputs, {"y": torch.zeros(6, WIDTH), "use": True})
        return result.loss, pipe.predict(inputs)

    for loss, output in run_on_threads(2, body):
        assert loss == 16.0 and torch.equal(output, 4 * ones)


def test_collective_calls_are_documented_as_collective(repository):
    """Otherwise a script that saves on rank 0 only would wait without a documented reason."""
    public = {name: each for name, each in vars(Pipeline).items() if not name.startswith("_")}
    calls = {name: each for name, each in public.items() if inspect.isfunction(each)}
    collective = {n for n, each in calls.items() if "collective_errors(" in inspect.getsource(each)}
    assert {"step", "evaluate", "save", "load", "timeline", "clip_grad_norm_"} <= collective
    page = (repository / "docs/reference/library.md").read_text()
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `pipe.")]
    documented = {
        name for call, who in rows if who.strip() in ("all", "replica") for name in _names(call)
    }
    assert documented == collective
    for name, each in calls.items():
        assert ("Every rank" in (each.__doc__ or "")) == (name in collective), name


def _names(call):
    return re.findall(r"pipe\.(\w+)", call)


def test_numpy_arrays_give_the_same_results_as_tensors():
    """Regression: arrays failed with "expected a nest with at least one tensor"."""
    inputs, targets = batch(7)
    x, y = inputs.numpy().copy(), targets.numpy().copy()

    def body(world):
        pipe = Pipeline(linears(3), mean_square, microbatches=2, world=world)
        pairs = [(inputs, targets), (x, y)]
        return (
            [pipe.step(*pair).loss for pair in pairs],
            [pipe.evaluate(*pair).loss for pair in pairs],
            [pipe.predict(part) for part in (inputs, x)],
        )

    for steps, evaluations, (one, other) in run_on_threads(2, body):
        assert steps[0] == steps[1]
        assert evaluations[0] == evaluations[1]
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(8.0, dtype=">f4").reshape(2, 4),
        np.arange(8.0, dtype=np.float32).reshape(2, 4)[:, ::-1],
        np.broadcast_to(np.float32(1), (2, 4)),
    ],
    ids=["byte order", "backwards", "read only"],
)
def test_arrays_that_torch_cannot_share_are_copied(array):
    pipe = Pipeline(nn.Sequential(nn.Identity()), mean_square)
    assert torch.equal(pipe.predict(array), torch.tensor(array.tolist()))


def test_array_of_strings_is_rejected():
    pipe = Pipeline(nn.Sequential(nn.Identity()), mean_square)
    with pytest.raises(DataError, match=r"inputs: torch has no dtype.*astype"):
        pipe.predict(np.array(["a", "b"]))
