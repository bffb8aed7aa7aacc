"""Fixture that runs the verify command on a small model in this process."""

from pathlib import Path

import pytest

from gpipe_hpc.config import compose_config
from gpipe_hpc.verify.run import verify

VECTORS = [
    "data=synthetic_vectors",
    "data.width=16",
    "data.num_classes=4",
    "model=mlp",
    "model._target_=users_layers.build",
    "model.width=16",
    "model.depth=4",
    "train.batch_size=24",
    "pipeline.microbatches=3",
    "pipeline.partition=uniform",
    "verify.steps=2",
]


@pytest.fixture
def compared(monkeypatch):
    """Return a function from settings to the report of verify on tests/verify/users_layers.py."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def run(*overrides):
        return verify(compose_config([*VECTORS, *overrides]))

    return run
