"""Which settings a run may change when it goes on, and how those that it may not are shown."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from omegaconf import OmegaConf

from gpipe_hpc.config import Config, config_yaml

# What a run trains, and on what, is in these sections; all others are about this start of it.
_SECTIONS: Final = ("model", "loss", "data", "optimizer", "lr", "train", "pipeline", "outer")
# Of the user's own making, so that a name more is a difference, not a newer version's setting.
_FREE_FORM: Final = ("model", "loss")
# No step computes another thing by these.
_NO_MATTER: Final = frozenset(
    {
        "data.workers",
        "data.prefetch",
        "data.index_dir",
        "data.num_validation_samples",
        "train.stop_at",
        "train.validate_every",
        "train.validate_batches",
        "train.log_every",
        "train.device",
        "train.keep_freed_memory",
        "train.num_threads",
    }
)
# A checkpoint goes on in any layout, and a run may be made longer: allowed, and said.
_LAYOUT: Final = frozenset(
    {"train.steps", "train.accumulation", "train.compile", "train.fuse_accumulation"}
)
# Settings of the pipeline are layout, but these change what a step computes.
_NO_LAYOUT: Final = frozenset({"pipeline.normalise_over_replicas", "pipeline.buffers"})
_ABSENT: Final = "not set"


class Change(NamedTuple):
    """A setting that another start of the run had otherwise."""

    setting: str
    was: object
    now: object

    @property
    def is_layout(self) -> bool:
        """Say whether a run may go on with it: where layers are and how they are run."""
        if self.setting in _LAYOUT:
            return True
        return self.setting.startswith("pipeline.") and self.setting not in _NO_LAYOUT

    @property
    def is_of_data(self) -> bool:
        """Say whether it changes which samples come when."""
        named = ("kind of data", "train.seed", "train.batch_size")
        return self.setting.startswith("data.") or self.setting in named

    def __str__(self) -> str:
        return f"{self.setting}: was {self.was}, is {self.now}"


def kinds_of(config: Config) -> dict[str, str]:
    """Return what kind of data and optimizer it is, which no setting says by itself."""
    return {"data": type(config.data).__name__, "optimizer": type(config.optimizer).__name__}


def changes(kept: Path, config: Config, kinds: Mapping[str, str]) -> list[Change]:
    """Return what differs from the settings in the file `kept`, which had data of these `kinds`.

    Settings that do not matter for what a step computes, and those that an older version did not
    know, are passed over. Nothing differs from a file that is not there or cannot be read.
    """
    before = read_settings(kept)
    if before is None:
        return []
    now = OmegaConf.to_container(OmegaConf.create(config_yaml(config)))
    assert isinstance(now, dict), f"settings are a mapping, not a {type(now).__name__}"
    was, is_ = dict(_leaves(before)), dict(_leaves(now))
    found = [Change(f"kind of {what}", kinds[what], kind) for what, kind in _other(kinds, config)]
    for setting in sorted(was.keys() | is_.keys()):
        section = setting.partition(".")[0]
        if setting in _NO_MATTER or (setting not in was and section not in _FREE_FORM):
            continue
        left, right = was.get(setting, _ABSENT), is_.get(setting, _ABSENT)
        if left != right:
            found.append(Change(setting, left, right))
    return found


def read_settings(path: Path) -> dict[Any, Any] | None:
    """Return the settings that a run folder kept, as they were written; None if there are none."""
    try:
        told = OmegaConf.to_container(OmegaConf.load(path))
    except Exception:  # a damaged file may raise anything
        return None
    return told if told and isinstance(told, dict) else None


def _other(kinds: Mapping[str, str], config: Config) -> Iterator[tuple[str, str]]:
    for what, kind in kinds_of(config).items():
        if kinds.get(what, kind) != kind:
            yield what, kind


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
