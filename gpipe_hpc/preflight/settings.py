"""Whether all ranks were started with one configuration.

A rank with another learning rate, or another number of steps, trains another model than the rest
or waits for them without an end. Each host composes its own settings, of its own files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from gpipe_hpc.comm.world.groups import check_agreement
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.settings import Config

# All that says what is trained and when all ranks do something together; the rest is about other
# commands, about rank 0 alone, or about how a host reaches the others.
_SECTIONS: Final = (
    *("model", "loss", "data", "optimizer", "lr", "train", "pipeline", "outer", "checkpoint"),
    *("trace", "preflight"),
)
# Ranks may be on unequal hosts.
_OF_A_HOST: Final = frozenset(
    {
        "train.device",
        "train.device_flops_per_s",
        "train.keep_freed_memory",
        "checkpoint.neighbour_dir",
        "preflight.out",
    }
)
_OWN: Final = ("model.", "loss.", "data.")  # which may hold paths under any name


def check_settings(world: World, config: Config) -> None:
    """Raise ConfigError, on every rank, if ranks were started with different settings.

    Every rank calls it. Paths may differ, as hosts may have copies: what is in them is compared
    where it is read.
    """
    check_agreement(world.everybody, shared_settings(config))


def shared_settings(config: Config) -> dict[str, object]:
    """Return what must be the same on every rank, by dotted name."""
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
        # What is no setting of a file, as an object of the caller's, has another address each time.
        is_plain = value is None or isinstance(value, list | tuple)
        yield name, repr(value) if is_plain else type(value).__name__
