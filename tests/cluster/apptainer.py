"""Parser for Apptainer definition files, and the paths of the scripts in an image."""

import re
from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT = "/.singularity.d/env/90-environment.sh"
RUNSCRIPT = "/.singularity.d/runscript"
TEST = "/.singularity.d/test"
SCRIPTS = {"environment": ENVIRONMENT, "runscript": RUNSCRIPT, "test": TEST}


def sections(text: str) -> dict[str, str]:
    """Return the sections of a definition by name; the name of the header is ""."""
    parts = re.split(r"^%(\w+)\n", text, flags=re.M)
    return dict(zip(["", *parts[1::2]], parts[::2], strict=True))


def arguments(found: Mapping[str, str]) -> dict[str, str]:
    """Return the default values of the arguments that --build-arg may set."""
    return dict(line.split("=", 1) for line in found["arguments"].split())


def filled(found: Mapping[str, str], **given: str) -> dict[str, str]:
    """Return sections with ``{{ NAME }}`` replaced by values; KeyError for an unknown name."""
    values = arguments(found) | given
    return {
        name: re.sub(r"\{\{ (\w+) \}\}", lambda match: values[match[1]], text)
        for name, text in found.items()
    }


def files(found: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (source, target) of each file that is copied from the repository."""
    lines = (line.split() for line in found["files"].strip().splitlines())
    return [(source, target) for source, target in lines]


def definition(repository: Path) -> dict[str, str]:
    """Return the sections of the definition file of this project."""
    return sections((repository / "cluster/apptainer/gpipe_hpc.def").read_text("utf-8"))
