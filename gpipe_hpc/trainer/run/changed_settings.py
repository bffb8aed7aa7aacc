"""Settings that may change when a run is resumed, and the comparison with earlier settings."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpipe_hpc.config import REMOVED, written
from gpipe_hpc.settings import Config
from gpipe_hpc.yaml_files import read_yaml

# Sections that determine what is trained, and on which data; others concern a single start.
_SECTIONS: Final = ("model", "loss", "data", "optimizer", "lr", "train", "pipeline", "outer")
# User-defined sections: an additional name is a difference, not a setting of a newer version.
_FREE_FORM: Final = ("model", "loss")
# Settings that do not change what a step computes.
_NO_MATTER: Final = frozenset(
    {
        "data._target_",  # compared as the kind of data
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
        "train.build_on",  # the weights come from the checkpoint
        "train.num_threads",
        "train.bind",
    }
)
# Allowed changes, which are logged: a checkpoint can be resumed in any layout and run longer.
_LAYOUT: Final = frozenset(
    {
        "train.steps",
        "train.accumulation",
        "train.compile",
        # Order of the all-reduce, and sharding of the optimizer's state.
        "outer.bucket_bytes",
        "outer.hierarchy",
        "outer.order",
        "outer.overlap",
        "outer.shard",
        "outer.weights",
        # A run that stopped at a corrupt sample may be resumed past it.
        "data.corrupt",
        "data.max_corrupt",
    }
)
# Settings of the pipeline are layout, but these change what a step computes.
_NO_LAYOUT: Final = frozenset({"pipeline.normalise_over_replicas", "pipeline.buffers"})
_ABSENT: Final = "not set"
_KINDS: Final = "kinds"


class Change(NamedTuple):
    """A setting with its values at an earlier start and now."""

    setting: str
    was: object
    now: object

    @property
    def is_layout(self) -> bool:
        """Return whether a run can be resumed with the change: it affects layout or length only."""
        if self.setting in _LAYOUT or (self.setting in REMOVED and not self.is_of_data):
            return True
        return self.setting.startswith("pipeline.") and self.setting not in _NO_LAYOUT

    @property
    def is_of_data(self) -> bool:
        """Return whether the change affects the samples or their order."""
        named = ("kind of data", "train.seed", "train.batch_size")
        return self.setting.startswith(("data.", "train.batch_ramp.")) or self.setting in named

    def __str__(self) -> str:
        return f"{self.setting}: was {self.was}, is {self.now}"


SETTINGS: Final = "settings"
"""Key, in a checkpoint's extra values, of the settings it was trained with."""


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings that `changes` compares, as JSON values."""
    told = written(config)
    kept: dict[str, Any] = {name: told[name] for name in _SECTIONS if name in told}
    return kept | {_KINDS: _kinds_of(config)}


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings from a run folder's config.yaml; empty if it is missing or invalid."""
    try:
        told = read_yaml(path)
    except (OSError, ValueError):
        return {}
    if not isinstance(told, dict) or told.keys().isdisjoint(_SECTIONS):
        return {}
    return {str(name): each for name, each in told.items()}


def changes(before: Mapping[str, Any], config: Config) -> list[Change]:
    """Return the differences between `before`, the settings of a checkpoint or file, and `config`.

    Settings are not compared if they do not affect what a step computes, if an older version did
    not have them, or if they were removed and had the value that corresponds to the current
    behaviour. If `before` is empty, there are no differences.
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
        if removed is not None and setting not in is_:  # a user's own function may have its name
            right = left if left == removed.inert else f"removed: {removed.instead}"
        if left != right:
            found.append(Change(setting, left, right))
    return found


def _kinds_of(config: Config) -> dict[str, str]:
    """Return the kind of data and the class of the optimizer, which no setting contains."""
    return {"data": config.data.kind, "optimizer": type(config.optimizer).__name__}


def _leaves(settings: Mapping[Any, Any]) -> Iterator[tuple[str, object]]:
    """Yield the settings of all sections by dotted name; a list is one value."""
    for section in _SECTIONS:
        yield from _below(section, settings.get(section))


def _below(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _below(f"{name}.{key}", inner)
    elif value is not None or "." in name:
        yield name, value
