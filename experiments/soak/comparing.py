"""Compare the ends of two runs: python -m experiments.soak.comparing RUN OTHER OUT

Writes JSON: the largest difference of any tensor in the newest checkpoints (weights and the
optimizer's state), and how many tensors were compared. No rank of a run imports this.
"""

import json
import math
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def stored(run: Path) -> dict[str, Tensor]:
    """Return all tensors of a run's newest checkpoint, read without gpipe_hpc."""
    reader = FileSystemReader(max((run / "checkpoints").glob("step_????????")))
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference; infinity if names or shapes differ, or a value is NaN."""
    if one.keys() != other.keys() or any(one[n].shape != other[n].shape for n in one):
        return math.inf
    found = [(one[name].double() - other[name].double()).abs().max().item() for name in one]
    return max(math.inf if math.isnan(each) else each for each in found)


def main() -> None:
    """Compare two runs and write the result."""
    run, other, out = map(Path, sys.argv[1:])
    tensors = stored(run), stored(other)
    answer = {"num_tensors": len(tensors[0]), "largest": largest_difference(*tensors)}
    out.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
