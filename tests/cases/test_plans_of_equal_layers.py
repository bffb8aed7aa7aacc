"""Layers that are equal, tied or one module in two places: planned, searched, trained in shards."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_hpc import LayerSpec, plan
from tests.support import train_here

VOCABULARY, WIDTH = 13, 8
DATA = ("data=synthetic", "data.seq_len=4", f"data.vocab_size={VOCABULARY}", "train.batch_size=8")
# Embedding with head, and two bodies.
NUM_PARAMETERS = VOCABULARY * WIDTH + 2 * (WIDTH * WIDTH + WIDTH)


class Numbered:
    """Equal to all others, as what only names a layer is."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbered)

    def __hash__(self) -> int:
        return 0


class Body(nn.Module):
    """A residual; its parameters stand under the number, if it has one."""

    def __init__(self, numbered: Numbered | None = None) -> None:
        super().__init__()
        self.path = "linear" if numbered is None else f"linear{numbered.number}"
        self.add_module(self.path, nn.Linear(WIDTH, WIDTH))

    def forward(self, inputs: Tensor) -> Any:
        return inputs + self.get_submodule(self.path)(inputs).tanh()


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH)) if weight is None else weight

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight.T


def numbered() -> list[LayerSpec]:
    """Return equal specs whose parameters have other names."""
    ends = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(Head)]
    first, last = (end.tied({"weight": "words"}) for end in ends)
    return [first, *(LayerSpec(Body, Numbered(i)) for i in range(2)), last]


def one_spec() -> list[LayerSpec]:
    """Return one spec in two places, and with what is tied within it in two more."""
    body = LayerSpec(Body)
    tied = body.tied({"linear.weight": "weight", "linear.bias": "bias"})
    ends = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(Head)]
    first, last = (end.tied({"weight": "words"}) for end in ends)
    return [first, body, tied, tied, last]


def one_module() -> list[nn.Module]:
    """Return a module in two places, and a parameter in two modules."""
    torch.manual_seed(0)
    embedding, body = nn.Embedding(VOCABULARY, WIDTH), Body()
    return [embedding, body, Body(), body, Head(embedding.weight)]


MODELS = ("numbered", "one_spec", "one_module")
SHARDS = ("none", "flat", "oss")


def model_of(name: str) -> tuple[str, str]:
    return "model=own", f"model._target_={__name__}.{name}"


@pytest.mark.parametrize("name", MODELS)
def test_they_are_planned_and_searched(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ways = [("pipeline.stages=2", "pipeline.replicas=2", f"outer.shard={each}") for each in SHARDS]
    searched = ("plan.search=true", "plan.ranks=2", "plan.flops_per_s=1e9")
    for words in (*ways, searched):
        monkeypatch.setattr(sys, "argv", ["plan", *model_of(name), *DATA, *words])
        with pytest.raises(SystemExit) as ended:
            plan.main()
        told = capsys.readouterr()
        assert ended.value.code == 0, told
        said = "outer.shard=" if words == searched else f" {NUM_PARAMETERS:,} parameters"
        assert said in told.out


@pytest.mark.parametrize("name", MODELS)
def test_a_run_plans_what_they_share_once(name: str, tmp_path: Path):
    """Of a module in two places each had weights and states of its own in a run's plan."""
    layout = ("pipeline.stages=1", "pipeline.replicas=2", "pipeline.microbatches=2")
    cheap = ("pipeline.partition=uniform", "outer.shard=flat", "train.validate_every=0")
    words = (*layout, *cheap, "train.steps=1", "lr.warmup_steps=0", f"run.dir={tmp_path}")
    train_here(2, *model_of(name), *DATA, *words)
    summary = json.loads((tmp_path / "summary.json").read_text())
    for rank in summary["ranks"]:
        # Buckets are padded to whole cache lines.
        assert 0 <= rank["planned_memory"]["weight_bytes"] - 4 * NUM_PARAMETERS < 100
