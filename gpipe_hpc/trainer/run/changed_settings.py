"""Which settings a run may change when it goes on, and how those that it may not are shown."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpipe_hpc.config import REMOVED, written
from gpipe_hpc.settings import Config
from gpipe_hpc.yaml_files import read_yaml

# What a run trains, and on what, is in these sections; all others are about this start of it.
_SECTIONS: Final = ("model", "loss", "data", "optimizer", "lr", "train", "pipeline", "outer")
# Of the user's own making, so that a name more is a difference, not a newer version's setting.
_FREE_FORM: Final = ("model", "loss")
# No step computes another thing by these.
_NO_MATTER: Final = frozenset(
    {
        "data._target_",  # the kind says it
        "data.workers",
        "data.prefetch",
        "data.index_dir",
        "data.num_validation_samples",
        "train.stop_at",
        "train.validate_every",
        "train.validate_batches",
        "train.log_every",
        "train.deterministic",
        "train.device",
        "train.keep_freed_memory",
        "train.build_on",  # a checkpoint has the weights
        "train.num_threads",
        "train.bind",
    }
)
# A checkpoint goes on in any layout, and a run may be made longer: allowed, and said.
_LAYOUT: Final = frozenset(
    {
        "train.steps",
        "train.accumulation",
        "train.compile",
        # How replicas sum exactly, and what each has of the optimizer's state.
        "outer.bucket_bytes",
        "outer.hierarchy",
        "outer.order",
        "outer.overlap",
        "outer.shard",
        "outer.weights",
        # A run that stopped at a corrupt sample may go on past it.
        "data.corrupt",
        "data.max_corrupt",
    }
)
# Settings of the pipeline are layout, but these change what a step computes.
_NO_LAYOUT: Final = frozenset({"pipeline.normalise_over_replicas", "pipeline.buffers"})
_ABSENT: Final = "not set"
_KINDS: Final = "kinds"


class Change(NamedTuple):
    """A setting that another start of the run had otherwise."""

    setting: str
    was: object
    now: object

    @property
    def is_layout(self) -> bool:
        """Say whether a run may go on with it: where layers are and how they are run."""
        if self.setting in _LAYOUT or self.setting in REMOVED:
            return True
        return self.setting.startswith("pipeline.") and self.setting not in _NO_LAYOUT

    @property
    def is_of_data(self) -> bool:
        """Say whether it changes which samples come when."""
        named = ("kind of data", "train.seed", "train.batch_size")
        return self.setting.startswith(("data.", "train.batch_ramp.")) or self.setting in named

    def __str__(self) -> str:
        return f"{self.setting}: was {self.was}, is {self.now}"


SETTINGS: Final = "settings"
"""The name, among what a checkpoint keeps for its run, of the settings it was trained with."""


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings that `changes` compares, fit for JSON."""
    told = written(config)
    kept: dict[str, Any] = {name: told[name] for name in _SECTIONS if name in told}
    return kept | {_KINDS: _kinds_of(config)}


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a run folder's file, as they were written; empty if there are none."""
    try:
        told = read_yaml(path)
    except (OSError, ValueError):
        return {}
    if not isinstance(told, dict) or told.keys().isdisjoint(_SECTIONS):
        return {}
    return {str(name): each for name, each in told.items()}


def changes(before: Mapping[str, Any], config: Config) -> list[Change]:
    """Return what differs from the settings `before`, of a checkpoint or a file.

    Settings that do not matter for what a step computes, and those that an older version did not
    know, are passed over. So is a setting that was removed since, if it asked for what every run
    does now. Nothing differs from no settings at all.
    """
    if not before:
        return []
    now = settings_of(config)
    kinds = before.get(_KINDS)
    kinds = kinds if isinstance(kinds, Mapping) else now[_KINDS]
    found = [
        Change(f"kind of {what}", kinds[what], kind)
        for what, kind in now[_KINDS].items()
        if kinds.get(what, kind) != kind
    ]
    was, is_ = dict(_leaves(before)), dict(_leaves(now))
    for setting in sorted(was.keys() | is_.keys()):
        section = setting.partition(".")[0]
        if setting in _NO_MATTER or (setting not in was and section not in _FREE_FORM):
            continue
        left, right = was.get(setting, _ABSENT), is_.get(setting, _ABSENT)
        removed = REMOVED.get(setting)
        if removed is not None:
            right = left if left == removed.inert else f"no setting any more: {removed.instead}"
        if left != right:
            found.append(Change(setting, left, right))
    return found


def _kinds_of(config: Config) -> dict[str, str]:
    """Return what kind of data and optimizer it is, which no setting says by itself."""
    return {"data": config.data.kind, "optimizer": type(config.optimizer).__name__}


def _leaves(settings: Mapping[Any, Any]) -> Iterator[tuple[str, object]]:
    """Yield what trains, by dotted name; a list is one value."""
    for section in _SECTIONS:
        yield from _below(section, settings.get(section))


def _below(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _below(f"{name}.{key}", inner)
    elif value is not None or "." in name:
        yield name, value
