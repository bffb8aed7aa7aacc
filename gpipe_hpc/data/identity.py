"""Identity of the samples of a run and of their order, stored in checkpoints with the position.

A position is the number of samples since the start of a run. It denotes the same samples only if
data, seed and batch size are unchanged. Files are identified by their names, sizes and some of
their samples, not by folders or dates: a copy on another machine is the same data.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch

from gpipe_hpc.data.dataset import (
    CorruptSampleError,
    Dataset,
    DataSource,
    read_both,
    samples_that_fit,
)
from gpipe_hpc.pytree import flatten
from gpipe_hpc.settings import DataConfig, TrainConfig

Identity = Mapping[str, Any]
"""A dictionary of JSON values."""

_ORDER: Final = 1  # version of the sampler's order
_RAMP: Final = "train.batch_ramp"  # start, steps and increment
_NUM_LOOKED_AT: Final = 16  # samples to hash, spread over the data


@runtime_checkable
class DecodedDataset(Protocol):
    """A dataset that decodes samples from stored bytes, with results that depend on the machine."""

    def stored(self, index: int) -> bytes:
        """Return the bytes from which sample `index` is decoded, inputs and target."""
        ...


def identify(source: DataSource, data: DataConfig, train: TrainConfig) -> Identity:
    """Return the properties that determine the samples of a run and their order.

    Reads some samples; raises DataError if one cannot be read.
    """
    dataset = source.train
    settings = {k: v for k, v in data.written().items() if k not in data.no_matter}
    ramp = train.batch_ramp
    return {
        "order": _ORDER,
        "train.seed": train.seed,
        "train.batch_size": train.batch_size,
        # None if there is no ramp, as in older checkpoints.
        _RAMP: None if ramp.start is None else [ramp.start, ramp.steps, ramp.increment],
        "samples": dataset.num_samples,
        # None if the settings determine the samples, so that they are compared instead.
        "digest": None if data.is_computed else _hash(dataset.digest()),
        "content": _content(dataset),
        "validation": _hash(source.validation.digest()),
        "kind": data.kind,
        "settings": {f"data.{name}": value for name, value in settings.items()},
    }


def differences(was: Identity, now: Identity) -> list[str]:
    """Describe the differences that change the samples of a run or their order; empty if none.

    Lists settings with both values if they explain the difference, else reports changed content.
    """
    order = ("train.seed", "train.batch_size", _RAMP)
    found = [_change(name, was, now) for name in order if was.get(name) != now.get(name)]
    before, after = was.get("settings", {}), now["settings"]
    settings = [_change(k, before, after) for k in after if before.get(k, after[k]) != after[k]]
    # The digest of older checkpoints depends on settings that do not matter, such as data.workers.
    is_same = not settings if now["digest"] is None else was.get("digest") == now["digest"]
    if is_same and all(was.get(key) == now.get(key) for key in ("order", "samples", "content")):
        return found
    if was.get("kind") != now.get("kind"):
        return [*found, _change("kind", was, now)]
    if was.get("samples") != now.get("samples"):
        settings.append(_change("samples", was, now))
    # The digest of augmented images contains the seed.
    if not settings and (was.get("content") != now.get("content") or not found):
        settings.append("the content of the data")
    return found + settings


def _change(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{name}: was {was.get(name)}, is {now.get(name)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _content(dataset: Dataset) -> str:
    """Return a hash of a few samples spread over the data."""
    hashed = hashlib.sha256()
    places = np.linspace(0, max(0, dataset.num_samples - 1), _NUM_LOOKED_AT)
    for index in dict.fromkeys(places.round().astype(np.int64).tolist()):
        if dataset.num_samples:
            with samples_that_fit():
                for part in _sample(dataset, index):
                    hashed.update(part)
    return hashed.hexdigest()[:16]


def _sample(dataset: Dataset, index: int) -> Iterator[bytes]:
    try:
        if isinstance(dataset, DecodedDataset):
            yield dataset.stored(index)
            return
        for leaf in flatten(read_both(dataset, [index], epoch=0))[0]:
            if isinstance(leaf, torch.Tensor):
                yield f"{leaf.dtype}{list(leaf.shape)}".encode()
                # View as bytes: NumPy lacks some dtypes of torch.
                yield leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            else:
                yield repr(leaf).encode()
    except CorruptSampleError:
        yield b"corrupt"
