"""An optimizer that is loaded goes on as if it had never stopped: options, kinds, other cuts."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.checkpoint import read_facts
from gpipe_hpc.checkpoint.loading import _places
from gpipe_hpc.checkpoint.manifest import manifest_text
from gpipe_hpc.checkpoint.metadata import StoredTensor
from gpipe_hpc.data_parallel import OwnedParameter
from gpipe_hpc.errors import CheckpointError
from gpipe_hpc.optim.optimizer import own_options
from tests.support import mean_square

WIDTH = 3


def pipeline(world=None):
    """Return two layers with parameters and one without, which a third rank holds."""
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH)
    return Pipeline([linear, linear, LayerSpec(nn.Identity)], mean_square, world=world)


def train(pipe, optimizer, steps=1):
    for _ in range(steps):
        pipe.step(torch.ones(4, WIDTH), torch.zeros(4, WIDTH))
        optimizer.step()


def by_kind(pipe, **biases):
    """Return groups of weights and of biases, the latter with options of their own."""
    weights = [p for p in pipe.parameters() if p.ndim > 1]
    return [
        {"params": weights},
        {"params": [p for p in pipe.parameters() if p.ndim == 1], **biases},
    ]


@pytest.mark.parametrize("is_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_chainable_scheduler_goes_on(tmp_path, num_ranks, is_tensor):
    """It went on from the learning rate of the start: 0.1, 0.05 instead of 0.0125, 0.00625."""

    def build(world):
        pipe = pipeline(world)
        lr = torch.tensor(0.1) if is_tensor else 0.1
        groups = pipe.parameters() or [{"params": []}]
        optimizer = torch.optim.AdamW(groups, lr=lr)
        return pipe, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def steps(pipe, optimizer, schedule, number):
        rates = []
        for _ in range(number):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            train(pipe, optimizer)
            schedule.step()
        return rates

    def saved(world):
        pipe, optimizer, schedule = build(world)
        steps(pipe, optimizer, schedule, 3)
        pipe.save(tmp_path / "kept", optimizer, {"last_epoch": schedule.last_epoch})
        return steps(pipe, optimizer, schedule, 2)

    def resumed(world):
        pipe, optimizer, schedule = build(world)
        schedule.load_state_dict(pipe.load(tmp_path / "kept", optimizer))
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == is_tensor
        return steps(pipe, optimizer, schedule, 2)

    unbroken = run_on_threads(2, saved)[0]
    assert unbroken == pytest.approx([0.0125, 0.00625])
    assert run_on_threads(num_ranks, resumed) == [unbroken] * num_ranks


def test_each_group_takes_the_options_of_its_parameters(tmp_path):
    def saved(world):
        pipe = pipeline(world)
        groups = by_kind(pipe, lr=0.3, weight_decay=0.0)
        pipe.save(tmp_path / "kept", torch.optim.AdamW(groups, lr=0.2, betas=(0.5, 0.6)))

    run_on_threads(2, saved)
    facts = json.loads((tmp_path / "kept" / "gpipe_hpc.json").read_text())
    assert [len(entry["parameters"]) for entry in facts["optimizer"]] == [2, 2], "each set once"
    pipe = pipeline()
    optimizer = torch.optim.AdamW(by_kind(pipe)[::-1], lr=1.0)
    pipe.load(tmp_path / "kept", optimizer)
    found = [(g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups]
    assert found == [(0.3, 0.0, (0.5, 0.6)), (0.2, 0.01, (0.5, 0.6))]


def test_a_group_of_mixed_options_is_refused(tmp_path):
    pipe = pipeline()
    pipe.save(tmp_path / "kept", torch.optim.SGD(by_kind(pipe, lr=0.3), lr=0.2))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
    wanted = r"lr=0\.[23] for layers\.0\.weight and lr=0\.[23] for layers\.0\.bias; create"
    with pytest.raises(CheckpointError, match=wanted):
        pipe.load(tmp_path / "kept", optimizer)
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_parameters_that_were_not_optimised_keep_their_groups_options(tmp_path):
    pipe = pipeline()
    weights, biases = by_kind(pipe)
    pipe.save(tmp_path / "kept", torch.optim.SGD([weights], lr=0.2))
    optimizer = torch.optim.SGD([weights, biases], lr=1.0)
    pipe.load(tmp_path / "kept", optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 1.0]


def test_a_checkpoint_of_an_earlier_version_loads(tmp_path):
    pipe = pipeline()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.2)
    train(pipe, optimizer)
    path = pipe.save(tmp_path / "kept", optimizer)
    facts = read_facts(path)
    del facts["optimizer"]
    (path / "gpipe_hpc.json").write_bytes(manifest_text(facts))
    other = torch.optim.AdamW(pipe.parameters(), lr=1.0)
    pipe.load(path, other)
    assert other.param_groups[0]["lr"] == 1.0
    assert len(other.state) == 4


def test_settings_given_to_a_resumed_run_stay(tmp_path):
    pipe = pipeline()
    pipe.save(tmp_path / "kept", torch.optim.SGD(pipe.parameters(), lr=0.2, weight_decay=0.1))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0, weight_decay=0.7)
    with own_options(optimizer):
        pipe.load(tmp_path / "kept", optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == 0.7


@pytest.mark.slow
def test_a_resumed_command_takes_its_settings_and_refuses_another_optimizer(
    train, start_ranks, tiny, tmp_path
):
    train(1, *tiny, "train.steps=4", "train.stop_at=1", "run.dir=run")
    own = ("run.dir=run", "checkpoint.resume=run")  # on purpose with other settings
    ranks = start_ranks(2, *tiny, "train.steps=4", "optimizer=sgd", *own).wait(60)
    assert all("exp_avg_sq, step), but this run uses SGD; use AdamW" in t for t in ranks.outputs)
    train(1, *tiny, "train.steps=2", "optimizer.weight_decay=0.7", *own)
    facts = json.loads((tmp_path / "run/checkpoints/step_00000002/gpipe_hpc.json").read_text())
    found = {entry["options"]["weight_decay"] for entry in facts["optimizer"]}
    assert found == {0.0, 0.7}


def test_another_kind_of_optimizer_is_refused_by_name(tmp_path):
    """Its state was stuffed into the other, which went on without a word."""

    def saved(world):
        pipe = pipeline(world)
        optimizer = torch.optim.AdamW(pipe.parameters())
        train(pipe, optimizer)
        pipe.save(tmp_path / "kept", optimizer)

    def resumed(world):
        pipe = pipeline(world)
        groups = [{"params": pipe.parameters()}]
        with pytest.raises(CheckpointError) as caught:
            pipe.load(tmp_path / "kept", torch.optim.SGD(groups, lr=0.1))
        return str(caught.value)

    run_on_threads(2, saved)
    for text in run_on_threads(3, resumed):
        assert "AdamW (its state: exp_avg, exp_avg_sq, step), but this run uses SGD" in text
        assert "optimizer=adamw" in text and "pipe.load without an optimizer" in text
    pipeline().load(tmp_path / "kept")


@pytest.mark.parametrize(
    ("kind", "switch"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
    ],
)
def test_a_switch_whose_state_is_not_there_is_refused(tmp_path, kind, switch):
    """It ended in a KeyError at the next step."""
    pipe = pipeline()
    optimizer = kind(pipe.parameters(), lr=0.1)
    train(pipe, optimizer)
    pipe.save(tmp_path / "kept", optimizer)
    (key,) = switch
    with pytest.raises(CheckpointError, match=f"with {key}=.*state that {key}="):
        pipe.load(tmp_path / "kept", kind(pipe.parameters(), lr=0.1, **switch))


@pytest.mark.parametrize("fused", [True, False])
def test_state_is_where_the_optimizer_reads_it(fused):
    """Fused and capturable kernels read the counter of steps, and other state may be small."""
    parameter = nn.Parameter(torch.empty(4, 3, device="meta"))
    optimizer = SimpleNamespace(param_groups=[{"params": [parameter], "fused": fused}], state={})
    shapes = {"step": (), "row_var": (4, 1), "exp_avg": (4, 3)}
    stored = {
        f"optimizer.w.{key}": StoredTensor(torch.Size(shape), torch.float32, "file", 0, 1)
        for key, shape in shapes.items()
    }
    states = {parameter: {key: f"optimizer.w.{key}" for key in shapes}}
    _, wanted, _ = _places(optimizer, states, stored, [OwnedParameter.full(parameter)])
    found = {name.rpartition(".")[2]: device.type for name, device in wanted.items()}
    assert found == {"step": "meta" if fused else "cpu", "row_var": "meta", "exp_avg": "meta"}
