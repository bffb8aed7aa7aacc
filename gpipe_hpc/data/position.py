"""Where in its data a run goes on: at the checkpoint's position, if the data are the same."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gpipe_hpc.data import Identity, differences
from gpipe_hpc.errors import CheckpointError

log = logging.getLogger("gpipe_hpc.train")

IDENTITY: Final = "data"
"""The key, among what a checkpoint keeps for its run, of what it knows of the data."""


def check_data(path: Path, extra: Mapping[str, Any], now: Identity, policy: str) -> None:
    """Compare a checkpoint's data with those of this run, and say what differs.

    `policy` is checkpoint.data. Raises CheckpointError where it is `same` and they are not.
    """
    was = extra.get(IDENTITY)
    if was is None:
        log.warning(
            "checkpoint %s: written by a version that kept nothing of the data, so whether they "
            "are the same is not known; validation may hold samples that it trained on",
            path,
        )
        return
    found = differences(was, now)
    if not found and was.get("validation") != now["validation"]:
        log.warning("checkpoint %s: was validated on other samples: losses do not compare", path)
    if not found:
        return
    text = "; ".join(found)
    if policy == "same":
        raise CheckpointError(
            f"checkpoint {path}: expected the data in the order that it was trained on, got "
            f"{text}; set them as they were, or checkpoint.data=new to begin the data anew with "
            f"the weights kept, or any to go on after {extra['position']} samples"
        )
    start = "at its first sample" if policy == "new" else f"after {extra['position']} samples"
    log.warning("the data differ from the checkpoint's (%s): going on %s of them", text, start)


def goes_on(extra: Mapping[str, Any], now: Identity, policy: str) -> bool:
    """Say whether the run goes on at the checkpoint's position: not where other data begin anew.

    Where nothing differs `new` changes nothing, so a run that is started again with the same
    command goes on with what it has begun anew.
    """
    was = extra.get(IDENTITY)
    return policy != "new" or was is None or not differences(was, now)
