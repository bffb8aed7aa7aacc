"""Check, on resume, whether a run's data is the same as when the checkpoint was written."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gpipe_hpc.data import Identity, differences
from gpipe_hpc.errors import CheckpointError

log = logging.getLogger("gpipe_hpc.train")

IDENTITY: Final = "data"
"""Key of the data's identity in a checkpoint's extra values."""


def check_data(path: Path, extra: Mapping[str, Any], now: Identity, policy: str) -> None:
    """Compare a checkpoint's data with the data of this run and log the differences.

    Args:
        path: the checkpoint, for messages.
        extra: the checkpoint's extra values.
        now: identity of the data of this run.
        policy: the setting checkpoint.data.

    Raises:
        CheckpointError: if the data differs and the policy is `same`.
    """
    was = extra.get(IDENTITY)
    if was is None:
        log.warning(
            "checkpoint %s: written by a version that did not record the data, so changes of the "
            "data cannot be detected; validation samples may have been trained on",
            path,
        )
        return
    found = differences(was, now)
    if not found and was.get("validation") != now["validation"]:
        log.warning(
            "checkpoint %s: the validation samples have changed: losses are not comparable", path
        )
    if not found:
        return
    text = "; ".join(found)
    if policy == "same":
        raise CheckpointError(
            f"checkpoint {path}: the data or its order differs from that of the checkpoint: "
            f"{text}; restore the settings, or set checkpoint.data=new to start at the first "
            f"sample with the checkpoint's weights, or checkpoint.data=any to continue after "
            f"{extra['position']} samples"
        )
    start = "its first sample" if policy == "new" else f"position {extra['position']} (samples)"
    log.warning("the data differs from the checkpoint's (%s): continuing at %s", text, start)


def continues_data(extra: Mapping[str, Any], now: Identity, policy: str) -> bool:
    """Return whether the run continues at the checkpoint's data position, not at the first sample.

    If the data is unchanged, the policy `new` has no effect, so that a second start with the same
    command resumes the run.
    """
    was = extra.get(IDENTITY)
    return policy != "new" or was is None or not differences(was, now)
