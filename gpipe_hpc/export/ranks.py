"""Export the weights of a running pipeline; each rank writes its own stages."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from gpipe_hpc.comm.collectives.group import barrier
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.export.files import (
    DEFAULT_PREFIX,
    SHARD_BYTES,
    ExportFolder,
    Exporting,
    Shard,
    refuse_parts,
)
from gpipe_hpc.models import global_name
from gpipe_hpc.models.huggingface.library import safetensors

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline


def export_safetensors(
    pipe: "Pipeline",
    folder: str | Path,
    shard_bytes: int = SHARD_BYTES,
    dtype: str | None = None,
    prefix: str = DEFAULT_PREFIX,
) -> Path:
    """Write all parameters and persistent buffers to a new folder of safetensors files.

    Every rank must call it. Each stage writes its own files, the first rank the index. The folder
    appears by one rename, complete or not at all. Tied parameters of a transformers model are
    stored once, as transformers does; those of other models under each of their names, as
    `load_state_dict` needs them. Returns the folder. Raises CheckpointError if the folder exists or
    cannot be written, and ConfigError for an unknown dtype or if safetensors is not installed.

    Args:
        pipe: the pipeline.
        folder: the new folder.
        dtype: dtype of the weights: float32, bfloat16 or float16; None: unchanged.
        prefix: text before the index of a layer in names; "" gives the names of a plain
            nn.Sequential.
        shard_bytes: largest size of a file, unless a single tensor is larger.
    """
    target = ExportFolder(folder, dtype, prefix)
    with collective_errors(pipe.world, f"export to {target.path}"):
        safetensors()
        shards = {
            s: _shards(tensors, shard_bytes) for s, tensors in _own_tensors(pipe, target).items()
        }
        layers = [layer for stage in pipe.stages.values() for layer in stage.layers.values()]
        parts = {
            index: layer.num_layers
            for stage in pipe.stages.values()
            for index, layer in stage.layers.items()
            if isinstance(layer, Exporting)
        }
        told = {s: len(x) for s, x in shards.items()}, parts
        numbers, parts = pipe.world_group.merge_object(told, _merged)
        refuse_parts(len(parts), max(parts.values(), default=0))
        if pipe.world.rank == 0:
            target.prepare()
        barrier(pipe.world_group)
        own = _write(shards, numbers, target), target.companion_files(layers)
        gathered = pipe.world_group.gather_object(own, root=0)
        if gathered is not None:
            sizes = {file: part for each, _ in gathered for file, part in each.items()}
            target.finish(sizes, {n: file for _, each in gathered for n, file in each.items()})
        barrier(pipe.world_group)
    return target.path


_Told = tuple[dict[int, int], dict[int, int]]
"""Number of files by stage, and number of the model's layers by layer of transformers."""


def _merged(ahead: _Told, behind: _Told) -> _Told:
    return ahead[0] | behind[0], ahead[1] | behind[1]


def _own_tensors(pipe: "Pipeline", target: ExportFolder) -> dict[int, Shard]:
    """Return the tensors that this rank writes, by stage and by name in the files."""
    found: dict[int, Shard] = {}
    pipe.await_parameters()
    for index, stage in pipe.stages.items():
        # Only one of the ranks that hold the stage writes it.
        if pipe.replica or pipe.schedule.placement.holders(index)[0] != pipe.stage_rank:
            continue
        named: dict[str, Tensor] = {
            name: parameter.detach()
            for name, parameter in stage.named_parameters().items()
            if stage.owns(name)
        }
        named |= stage.named_buffers()
        found[index] = {}
        for layer, module in stage.layers.items():
            prefix = global_name(layer, "")
            own = {n.removeprefix(prefix): t for n, t in named.items() if n.startswith(prefix)}
            if not isinstance(module, Exporting):
                state = module.state_dict()
                kept = {n for n in state if n.rpartition(".")[2] != "_extra_state"}
                own = {n: tensor for n, tensor in state.items() if n in kept}
            found[index] |= target.named(layer, module, own)
    return found


def _shards(tensors: Shard, shard_bytes: int) -> list[Shard]:
    """Divide the tensors of a stage into files."""
    shards: list[Shard] = []
    room = 0
    for name, tensor in tensors.items():
        if not shards or tensor.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def _write(
    shards: Mapping[int, list[Shard]], numbers: Mapping[int, int], target: ExportFolder
) -> dict[str, dict[str, int]]:
    """Write this rank's files; return the bytes of each tensor in each file."""
    total = sum(numbers.values())
    written = []
    for stage, files in shards.items():
        ahead = sum(count for other, count in numbers.items() if other < stage)
        written += [target.write(s, number, total) for number, s in enumerate(files, ahead + 1)]
    return dict(written)
