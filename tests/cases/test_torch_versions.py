"""Versions of torch: which are refused, and training without names that only some of them have."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads, torch_compat
from gpipe_hpc.errors import ConfigError, GpipeError

ROOT = Path(__file__).resolve().parents[2]


def make_pipeline(world=None) -> Pipeline:
    return Pipeline([nn.Linear(2, 2)], lambda y, t: (y - t).square().mean(), stages=1, world=world)


def start_pipeline() -> None:
    run_on_threads(1, make_pipeline)


@pytest.mark.parametrize("version", ["2.7.1+cu126", "1.13.0", "2.8.0a0+git1234"])
def test_a_torch_that_is_too_old_is_refused_at_the_start(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    if version.startswith("2.8"):
        start_pipeline()
        return
    told = f"torch: version {version.replace('+', '.')} is too old; install torch 2.8 to 2"
    with pytest.raises(ConfigError, match=told):
        start_pipeline()


@pytest.mark.parametrize(
    "version, warns",
    [
        ("2.8.0", False),
        ("2.13.0a0+8145d630e8.nv26.06", False),
        ("2.15.1+cu130", False),
        ("2.16.0.dev20270105", True),
        ("3.0.0", True),
    ],
)
def test_a_torch_that_nobody_has_tested_is_warned_of_once(version, warns, monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", version)
    torch_compat.warn_of_untested_torch.cache_clear()
    start_pipeline()
    start_pipeline()
    found = [record.getMessage() for record in caplog.records]
    assert [f"torch {version} is newer than 2.15" in text for text in found] == [True] * warns


@pytest.mark.parametrize(
    "name",
    [
        "torch._C._current_graph_task_id",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.nn.modules.batchnorm._NormBase",
        "torch.utils._pytree.tree_flatten",
    ],
)
def test_a_torch_without_a_name_that_everything_needs_is_refused(name, monkeypatch):
    monkeypatch.delattr(name)
    with pytest.raises(ConfigError, match=rf"torch: version \S+ has no {name}, .*newer gpipe_hpc"):
        start_pipeline()


def run_python(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_command_says_which_names_are_missing_and_ends_with_code_2():
    program = """
import runpy, torch, torch.distributed
del torch._C._current_graph_task_id, torch.distributed.distributed_c10d._get_default_store
runpy.run_module("gpipe_hpc.train", run_name="__main__", alter_sys=True)
"""
    done = run_python(program, "train.steps=1")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    missing = "torch._C._current_graph_task_id, torch.distributed.distributed_c10d._get_default_s"
    assert f"has no {missing}" in line
    assert "install torch 2.8 to 2" in line


WITHOUT = """
import copy, logging
import torch

taken = []
for name in ("_C._storage_Use_Count", "_C._will_engine_execute_node", "_C._is_fwd_grad_enabled",
             "_C._are_functorch_transforms_active", "autograd.graph._engine_run_backward",
             "_C._autograd._top_saved_tensors_default_hooks", "_debug_has_internal_overlap"):
    *path, last = name.split(".")
    place = torch
    for part in path:
        place = getattr(place, part)
    taken.append((place, last, getattr(place, last)))
    delattr(place, last)
import gpipe_hpc.torch_compat
for place, last, value in taken:  # torch uses some itself
    setattr(place, last, value)

from gpipe_hpc import Pipeline, run_on_threads
from torch import nn

told = []
logging.getLogger("gpipe_hpc.pipeline").addHandler(handler := logging.Handler())
handler.emit = lambda record: told.append(record.getMessage())


def loss_fn(output, target):
    return (output - target).square().mean()


torch.manual_seed(3)
made = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()).double() for _ in range(4)]


def with_torch(x, y, num):
    model = nn.Sequential(*copy.deepcopy(made))
    for a, b in zip(x.tensor_split(num), y.tensor_split(num)):
        (loss_fn(model(a), b) * len(a) / len(x)).backward()
    return {f"layers.{name}": p.grad for name, p in model.named_parameters()}


generator = torch.Generator().manual_seed(5)
x, y = (torch.randn(24, 4, generator=generator, dtype=torch.float64) for _ in "xy")
for schedule, recompute, replicas in (
    ("zb_h1", "never", 1), ("gpipe", "always", 2), ("one_f_one_b", "never", 1)
):
    def train(world):
        pipe = Pipeline(copy.deepcopy(made), loss_fn, stages=2, microbatches=3,
                        schedule=schedule, recompute=recompute, world=world)
        part = pipe.share(len(x))
        pipe.step(x[part], y[part])
        return {name: p.grad for name, p in pipe.named_parameters()}

    expected = with_torch(x, y, 3 * replicas)
    found = {k: v for rank in run_on_threads(2 * replicas, train) for k, v in rank.items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
assert len(told) == 1 and "does not support split backwards" in told[0], told
"""


def test_training_without_the_names_that_have_a_fallback_is_the_same():
    done = run_python(WITHOUT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_autocast_around_a_step_gives_every_weight_its_gradient(schedule, recompute):
    """Up to torch 2.10, a recomputation was given casts from a forward without a graph."""
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    x, y = torch.randn(2, 8, 4)
    pipe = Pipeline(
        layers,
        lambda output, target: (output.float() - target).square().mean(),
        microbatches=4,
        schedule=schedule,
        recompute=recompute,
    )
    for _ in range(2):  # the first forwards of all have a graph
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            ((plain(a).float() - b).square().mean() / 4).backward()
    found = dict(pipe.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[f"layers.{name}"].grad, parameter.grad)


class AsksForItsOwn(nn.Linear):
    """Takes the gradient of its own weight within its forward."""

    def __init__(self, *, with_gradient: bool) -> None:
        super().__init__(4, 4)
        self.with_gradient = with_gradient

    def forward(self, x):
        with torch.enable_grad():
            energy = super().forward(x).square().sum(0)
            gradient = torch.ones_like(energy) if self.with_gradient else None
            energy = energy if self.with_gradient else energy.sum()
            torch.autograd.backward(energy, gradient, inputs=[self.weight])
        return super().forward(x)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_backward_to_its_own_weight_within_a_layer_is_refused_if_it_would_be_empty(with_gradient):
    """Torch up to 2.10 does not hand such a call over; the gradient was silently left out."""
    layers = [nn.Linear(4, 4), AsksForItsOwn(with_gradient=with_gradient)]
    x = torch.randn(4, 4)
    pipe = Pipeline(layers, lambda y, t: (y - t).square().mean(), schedule="zb_h1", microbatches=2)
    with pytest.raises(GpipeError, match="differentiates with respect to a parameter"):
        pipe.step(x, x)
    pipe = Pipeline(layers, lambda y, t: (y - t).square().mean(), schedule="gpipe", microbatches=2)
    pipe.step(x, x)
