"""Check that all ranks were started with the same configuration.

Ranks with another learning rate or number of steps would train another model, or wait forever. Each
host composes its settings from its own files, so they may differ.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from gpipe_hpc.comm.world.groups import check_agreement
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.settings import Config

# Sections that affect the training or collective operations; the others concern other commands,
# only rank 0, or how a host connects to the others.
_SECTIONS: Final = (
    *("model", "loss", "data", "optimizer", "lr", "train", "pipeline", "outer", "checkpoint"),
    *("trace", "preflight"),
)
# Settings that may differ, because hosts may differ.
_OF_A_HOST: Final = frozenset(
    {
        "train.device",
        "train.device_flops_per_s",
        "train.keep_freed_memory",
        "checkpoint.neighbour_dir",
        "preflight.out",
    }
)
_OWN: Final = ("model.", "loss.", "data.")  # may contain paths under any name


def check_settings(world: World, config: Config) -> None:
    """Raise ConfigError on every rank if ranks were started with different settings. Collective.

    Paths may differ, because hosts may have copies of files; the content is compared when it is
    read.
    """
    check_agreement(world.world_group, shared_settings(config))


def shared_settings(config: Config) -> dict[str, object]:
    """Return the settings that must be equal on every rank, by dotted name."""
    kinds = {
        "kind of data": config.data.kind,
        "kind of optimizer": type(config.optimizer).__name__,
        "kind of outer": type(config.outer).__name__,
        "settings of model": ", ".join(sorted(config.model)),
        "settings of loss": ", ".join(sorted(config.loss)),
    }
    apart = _OF_A_HOST | {f"data.{name}" for name in config.data.no_matter}
    found = {
        name: value
        for section in _SECTIONS
        for name, value in _leaves(section, getattr(config, section))
        if name not in apart and not (name.startswith(_OWN) and "/" in str(value))
    }
    return kinds | found


def _leaves(name: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _leaves(f"{name}.{each.name}", getattr(value, each.name))
    elif isinstance(value, bool | int | float | str):
        yield name, value
    else:
        # The repr of an object passed by the caller contains its address: compare its type only.
        is_plain = value is None or isinstance(value, list | tuple)
        yield name, repr(value) if is_plain else type(value).__name__
