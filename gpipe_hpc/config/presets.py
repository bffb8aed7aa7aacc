"""The presets of ``conf/``: the YAML files of its groups, as they are written."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from omegaconf import OmegaConf

from gpipe_hpc.errors import ConfigError

CONF_VARIABLE: Final = "GPIPE_HPC_CONF"
_CONF_MARK: Final = "# gpipe_hpc:"


def conf_dir() -> Path:
    """Return the folder of the YAML files, from any working directory.

    The first of $GPIPE_HPC_CONF, ``conf/`` beside the package (a checkout, an editable install)
    and ``conf/`` inside it (an installed wheel). Raises ConfigError if none is there.
    """
    package = Path(__file__).resolve().parent.parent
    named = os.environ.get(CONF_VARIABLE)
    candidates = [Path(named).resolve()] if named else [package.parent / "conf", package / "conf"]
    for folder in candidates:
        config = folder / "config.yaml"
        # Installed, package.parent is site-packages: a conf/ there may be anybody's.
        if config.is_file() and config.read_text("utf-8").startswith(_CONF_MARK):
            return folder
    raise ConfigError(
        f"conf: no settings found, expected a config.yaml that starts with {_CONF_MARK!r}, looked "
        f"in {', '.join(map(str, candidates))}; "
        + (f"correct ${CONF_VARIABLE}" if named else "install the package anew")
    )


def preset(group: str, name: str | None) -> dict[str, Any]:
    """Return what a preset says, unresolved; empty where ``conf/`` has none of this name."""
    path = conf_dir() / group / f"{name}.yaml"
    return as_written(OmegaConf.load(path)) if path.is_file() else {}


def presets(group: str) -> dict[str, dict[str, Any]]:
    """Return what each preset of a group says, by its name."""
    names = sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
    return {name: preset(group, name) for name in names}


def targets(group: str) -> set[str]:
    """Return what the presets of a group build."""
    return {each["_target_"] for each in presets(group).values() if each.get("_target_")}


# Where kinds of data are defined in settings of older runs, and where they are now.
_MOVED: Final = ("gpipe_hpc." + "training.data.", "gpipe_hpc." + "data.")


def current_target(target: str) -> str:
    """Return the name that a kind of data has now; any other target as it is."""
    if target.startswith(_MOVED[0]) and target not in targets("data"):
        return target.replace(*_MOVED)
    return target


def presets_with(group: str, setting: str) -> list[str]:
    """Return the names of the presets that have a setting."""
    return [name for name, each in presets(group).items() if setting in each]


def settings_of_presets(group: str) -> Iterable[str]:
    """Return the settings that any preset of a group has, each once."""
    found = (key for each in presets(group).values() for key in each if not key.startswith("_"))
    return dict.fromkeys(found)


def as_written(section: Any) -> dict[str, Any]:
    """Return settings that are not resolved yet."""
    raw = OmegaConf.to_container(section, resolve=False)
    assert isinstance(raw, dict), f"expected settings, got {raw!r}"
    return {str(key): value for key, value in raw.items()}
