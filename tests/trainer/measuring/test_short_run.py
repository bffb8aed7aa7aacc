"""A run of layers with hardly any work, which change no number; nobody hears of it."""

import logging
import sys

import pytest
import torch
from torch import nn

from gpipe_hpc import run_on_threads
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.config import compose_config
from gpipe_hpc.errors import DataError
from gpipe_hpc.trainer.measuring import short_run
from gpipe_hpc.trainer.measuring.short_run import ReadingLayer, prices_of_short_run


@pytest.mark.parametrize("num_read", [0, 1000])
def test_a_layer_that_reads_does_what_a_linear_one_does(num_read):
    layer, plain = ReadingLayer(4, num_read), nn.Linear(4, 4)
    plain.load_state_dict(layer.state_dict())
    given = torch.randn(2, 4, requires_grad=True)
    alike = given.detach().clone().requires_grad_()
    layer(given).square().sum().backward()
    plain(alike).square().sum().backward()
    assert torch.equal(layer(given), plain(alike))
    assert torch.equal(given.grad, alike.grad)
    assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_what_is_read_is_nothing_that_ranks_sum_send_or_save():
    layer = ReadingLayer(4, 1000)
    assert sum(each.numel() for each in layer.state_dict().values()) == 20


def test_forward_and_backward_read(monkeypatch):
    summed = []
    layer = ReadingLayer(4, 1000)
    whole = torch.Tensor.sum

    def sum_of(self, *args, **keywords):
        summed.append(self.numel())
        return whole(self, *args, **keywords)

    monkeypatch.setattr(torch.Tensor, "sum", sum_of)
    output = layer(torch.ones(2, 4))
    assert summed == [1000]
    output.backward(torch.ones_like(output))
    assert summed == [1000, 1000]


def found(folder, ranks, mesh, *words):
    config = compose_config(["model=mlp", "data=synthetic_vectors", *words])
    return run_on_threads(ranks, lambda world: prices_of_short_run(config, world, mesh, folder))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(short_run, "_READ", 1000)


@pytest.mark.parametrize("mesh", [Mesh(1, 2), Mesh(2, 1)])
def test_rank_0_gets_what_a_run_of_this_shape_measured(tmp_path, capsys, caplog, mesh):
    caplog.set_level(logging.INFO)
    before = sys.stdout
    first, *others = found(tmp_path / "run", mesh.size, mesh, "optimizer=sgd")
    assert others == [None] * (mesh.size - 1)
    assert first.action_s > 0 <= first.step_s
    assert first.measured.optimizer == "sgd"
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""
    assert not [each for each in caplog.records if each.levelno < logging.WARNING]
    assert sys.stdout is before and logging.root.manager.disable == 0


def test_only_the_users_settings_beside_layers_count(tmp_path):
    words = ("train.steps=9", "train.clip_norm=null", "metrics.to=[tensorboard,wandb]")
    config = compose_config(["model=mlp", "data=synthetic_vectors", *words, "checkpoint.every=3"])
    (own,) = run_on_threads(
        1, lambda world: short_run._settings(config, world, Mesh(1, 1), tmp_path)
    )
    assert own.train.clip_norm is None and own.train.steps == short_run._STEPS
    assert own.metrics.to == ["tensorboard"], "a tracker would be told of a run that is none"
    assert own.checkpoint.every == 0 and own.run.dir == str(tmp_path)
    assert type(own.optimizer) is type(config.optimizer) and own.optimizer.lr < 1e-5


def test_a_run_that_measured_nothing_is_told_of_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(short_run, "run_training", lambda config, world, stop: 0)
    with pytest.raises(DataError, match="short run"):
        found(tmp_path / "run", 2, Mesh(1, 2))


def test_its_folder_is_gone_where_it_fails(tmp_path, monkeypatch):
    def failing(config, world, stop):
        (tmp_path / "run").mkdir(exist_ok=True)
        raise RuntimeError("no such layers")

    monkeypatch.setattr(short_run, "run_training", failing)
    with pytest.raises(RuntimeError, match="no such layers"):
        found(tmp_path / "run", 1, Mesh(1, 1))
    assert not (tmp_path / "run").exists()
