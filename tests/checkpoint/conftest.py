"""Fixtures for tests of checkpoints: a small model with all kinds of state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from tests.support import mean_square

WIDTH = 3


class Counting(nn.Linear):
    """A linear layer that counts its calls; the count is its extra state."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.num_calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Increment the count and apply the linear layer."""
        self.num_calls += 1
        return super().forward(inputs)

    def get_extra_state(self) -> Any:
        """Return the count, together with values of several other types."""
        last = torch.full((2,), float(self.num_calls))
        return {"calls": self.num_calls, 7: (None, [True, 0.5, "text"]), "last": (last,)}

    def set_extra_state(self, state: Any) -> None:
        """Restore the count; assert that the other values are unchanged."""
        self.num_calls = state["calls"]
        assert state == self.get_extra_state() | {"last": state["last"]}
        assert torch.equal(state["last"][0], torch.full((2,), float(self.num_calls)))


class Run(NamedTuple):
    """A pipeline and its optimizer."""

    pipe: Pipeline
    optimizer: torch.optim.Optimizer

    def step(self, number: int = 1) -> None:
        """Train `number` steps."""
        for _ in range(number):
            batch = torch.arange(4.0 * WIDTH).reshape(4, WIDTH)
            self.pipe.step(batch, batch.flip(0))
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return copies of everything that loading a checkpoint may change."""
        pipe, found = self.pipe, {}
        for stage in pipe.stages.values():
            found |= {n: p.detach().clone() for n, p in stage.named_parameters().items()}
            found |= {n: b.clone() for n, b in stage.named_buffers().items()}
            for name, module in stage.extra_states().items():
                found[name] = torch.tensor(module.num_calls)
        for name, parameter in pipe.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}:{key}"] = torch.as_tensor(value).clone()
        found["position"] = torch.tensor([pipe.steps_done, pipe.loss_weight])
        rates = [group["lr"] for group in self.optimizer.param_groups]
        found["lr"] = torch.tensor(rates)
        return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two states are bitwise equal."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def new_run(world: Any = None, seed: int = 0, lr: float = 0.1, width: int = WIDTH) -> Run:
    """Create a model with tied weights, BatchNorm and extra state, and its optimizer."""
    tied = LayerSpec(nn.Linear, width, width, bias=False).tied({"weight": "shared"})
    layers = [tied, LayerSpec(nn.BatchNorm1d, width), LayerSpec(Counting, width), tied]
    pipe = Pipeline(layers, mean_square, microbatches=2, recompute="never", seed=seed, world=world)
    groups = pipe.parameters() or [{"params": []}]
    return Run(pipe, torch.optim.AdamW(groups, lr=lr))


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that trains on some ranks, saves, and returns the checkpoint's path."""

    def save(name: str = "step_2", num_ranks: int = 2, steps: int = 2) -> Path:
        def body(world: Any) -> Path:
            run = new_run(world)
            run.step(steps)
            return run.pipe.save(tmp_path / name, run.optimizer, {"position": steps})

        return run_on_threads(num_ranks, body)[0]

    return save


@pytest.fixture(name="new_run")
def new_run_fixture() -> Callable[..., Run]:
    """Return `new_run`."""
    return new_run


@pytest.fixture(name="same")
def same_fixture() -> Callable[..., bool]:
    """Return `same`."""
    return same
