"""What each setting means, as ``conf/`` says it: for help on the screen and for the documents."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_LINE: Final = re.compile(
    r"(?P<indent> *)(?P<key>[\w.]+):(?P<value>(?: [^#]*)?)(?:# (?P<meaning>.*))?"
)


class Explained(NamedTuple):
    """A setting by its dotted name, its default as written, and its meaning with its unit."""

    name: str
    default: str
    meaning: str


class Section(NamedTuple):
    """A part of ``config.yaml``."""

    name: str
    meaning: str
    settings: tuple[Explained, ...]


def settings_of(path: Path) -> Iterator[Explained]:
    """Yield what a YAML file sets, in its order; groups of settings have an empty default.

    The meaning stands behind a setting, or in the comment lines above it.
    """
    open_keys: list[str] = []
    above: list[str] = []
    in_defaults = False
    for line in path.read_text("utf-8").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            is_comment = line.startswith(" ") and line.lstrip().startswith("#")
            above = [*above, line.lstrip(" #")] if is_comment else []
            continue
        depth = len(match["indent"]) // 2
        in_defaults = match["key"] == "defaults" if depth == 0 else in_defaults
        if in_defaults:
            continue
        open_keys[depth:] = [match["key"]]
        meaning = " ".join([*above, (match["meaning"] or "").strip()]).strip()
        above = []
        yield Explained(".".join(open_keys), match["value"].strip(), meaning)


def sections_of(path: Path) -> list[Section]:
    """Return the sections of the main file, except for Hydra's own."""
    found: dict[str, Section] = {}
    for each in settings_of(path):
        name, _, rest = each.name.partition(".")
        if not rest:
            found[name] = Section(name, each.meaning, ())
            if each.default:
                found[name] = Section(name, "", (each,))
        elif each.default:
            section = found[name]
            found[name] = section._replace(settings=(*section.settings, each))
    found.pop("hydra", None)
    return list(found.values())


def about(path: Path) -> str:
    """Return what the comment at the top of a preset says."""
    comments = []
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        comments.append(line.lstrip("# "))
    return " ".join(comments)
