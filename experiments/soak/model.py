"""The user model of a soak test: a small network that executes commands from a file.

The environment variable $SOAK_ORDER names a JSON file with `rank` and `what`. The named rank
executes the command once, after writing the time to a file `<order>.done`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from gpipe_hpc import LayerSpec

BLAME: Final = "the layer that the soak broke"
NUM_LAYERS: Final = 17
_STUCK_S: Final = 3600.0


class CommandedLayer(nn.Module):
    """A residual layer with dropout: [B, width] -> [B, width].

    The first layer also casts its input and, in training, sleeps for `pace_s` in its forward.
    """

    def __init__(self, width: int, dtype: torch.dtype, is_first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=dtype)
        self.dropout = nn.Dropout(0.1)
        self._dtype, self._is_first = dtype, is_first

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus the output of the layer."""
        if self._is_first:
            time.sleep(float(os.environ.get("SOAK_PACE_S", "0")))
            x = x.to(self._dtype)
        y: Tensor = x + self.dropout(torch.tanh(self.linear(x)))
        return self._obey(y) if self.training else y

    def _obey(self, y: Tensor) -> Tensor:
        match ordered():
            case "forward":
                _note()
                raise ValueError(BLAME)
            case "backward" if y.requires_grad:  # otherwise this forward is recomputed later
                hooked: Any = y  # torch has no types for hooks
                hooked.register_hook(_break)
            case "os._exit(0)":
                _note()
                os._exit(0)
            case "os._exit(7)":
                _note()
                os._exit(7)
            case "sys.exit(3)":
                _note()
                sys.exit(3)
        return y


def build(width: int = 64, num_classes: int = 10, dtype: str = "float64") -> list[LayerSpec]:
    """Return the layers, and install the hook that executes commands during a save."""
    number_type = {"float32": torch.float32, "float64": torch.float64}[dtype]
    patch.object(FileSystemWriter, "write_data", _obedient(_WRITE)).start()
    layers = [LayerSpec(CommandedLayer, width, number_type, i == 0) for i in range(NUM_LAYERS)]
    return [*layers, LayerSpec(nn.Linear, width, num_classes, dtype=number_type)]


_WRITE: Final = FileSystemWriter.write_data


def _obedient(write: Callable[..., Any]) -> Callable[..., Any]:
    def write_data(self: FileSystemWriter, *arguments: Any) -> Any:
        if ordered() == "before its file":
            _note()
            time.sleep(_STUCK_S)
        done = write(self, *arguments)
        if ordered() == "after its file":
            _note()
            time.sleep(_STUCK_S)
        return done

    return write_data


def _break(gradient: Tensor) -> None:
    _note()
    raise ValueError(BLAME)


def ordered() -> str:
    """Return the command for this rank, empty if there is none."""
    path = os.environ.get("SOAK_ORDER", "")
    if not path or not os.path.exists(path):
        return ""
    order = json.loads(Path(path).read_text())
    return order["what"] if str(order["rank"]) == os.environ["RANK"] else ""


def _note() -> None:
    Path(os.environ["SOAK_ORDER"] + ".done").write_text(str(time.time()))
