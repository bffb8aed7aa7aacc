"""The trained model: predict the byte after sixteen others, on the Python standard library."""

import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.outer.stale.shard import Values

_CONTEXT, _EMBEDDED, _HIDDEN, _BYTES = 16, 16, 256, 256
_HELD_OUT: Final = 10  # one file in ten
_BATCH: Final = 64
_NUM_VALIDATION: Final = 4096


class Text(NamedTuple):
    """Bytes for training, and held-out bytes."""

    train: Tensor
    held_out: Tensor


def read_text(most_bytes: int = 4_000_000) -> Text:
    """Return the files of the standard library's top folder; every tenth is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    train = b"".join(f.read_bytes() for n, f in enumerate(files) if n % _HELD_OUT)[:most_bytes]
    held_out = b"".join(f.read_bytes() for f in files[::_HELD_OUT])
    return Text(
        *(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out))
    )


def initial_values(seed: int = 0) -> Values:
    """Return the initial parameters."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    width = _CONTEXT * _EMBEDDED
    return {
        "embedding": drawn(_BYTES, _EMBEDDED, scale=0.5),
        "hidden.weight": drawn(_HIDDEN, width, scale=width**-0.5),
        "hidden.bias": torch.zeros(_HIDDEN),
        "output.weight": drawn(_BYTES, _HIDDEN, scale=_HIDDEN**-0.5),
        "output.bias": torch.zeros(_BYTES),
    }


def loss_at(values: Mapping[str, Tensor], text: Tensor, places: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of the bytes after the contexts at `places`."""
    window = text[places[:, None] + torch.arange(_CONTEXT + 1)].long()
    embedded = F.embedding(window[:, :_CONTEXT], values["embedding"]).flatten(1)
    hidden = torch.tanh(F.linear(embedded, values["hidden.weight"], values["hidden.bias"]))
    logits = F.linear(hidden, values["output.weight"], values["output.bias"])
    return F.cross_entropy(logits, window[:, _CONTEXT])


def places_of(text: Tensor, worker: int, clock: int, number: int = _BATCH) -> Tensor:
    """Return the positions of the contexts of a worker's iteration."""
    generator = torch.Generator().manual_seed(1_000_003 * clock + worker)
    return torch.randint(len(text) - _CONTEXT, (number,), generator=generator)


def validation_loss(values: Mapping[str, Tensor], text: Text) -> float:
    """Return the loss at fixed positions of the held-out text."""
    with torch.no_grad():
        places = places_of(text.held_out, -1, 0, _NUM_VALIDATION)
        return loss_at(values, text.held_out, places).item()


def update_of(values: Values, text: Text, worker: int, clock: int, rate: float) -> Values:
    """Return a gradient step on a worker's batch with learning rate `rate`."""
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    loss = loss_at(leaves, text.train, places_of(text.train, worker, clock))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {name: -rate * g for name, g in zip(leaves, gradients, strict=True)}
