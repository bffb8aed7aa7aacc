"""Find the newest intact checkpoint to resume from, verified by all ranks."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from gpipe_hpc.checkpoint import Verified, read_facts, verify
from gpipe_hpc.comm.collectives.group import ControlGroup
from gpipe_hpc.errors import CheckpointError
from gpipe_hpc.trainer.run.folder import Checkpoints

log = logging.getLogger("gpipe_hpc.train")


def newest_intact(
    checkpoints: Checkpoints,
    resume: str,
    is_restart: bool,
    group: ControlGroup,
    rank: int,
    say: Callable[[str], None] = lambda _: None,
) -> Verified | None:
    """Return the verified checkpoint selected by `checkpoint.resume`; None to start from scratch.

    If the newest checkpoint of a folder is damaged, the newest intact one is used, with a warning.
    Collective; only the first rank lists folders.

    Args:
        checkpoints: the checkpoints of the run.
        resume: the setting checkpoint.resume.
        is_restart: whether a launcher repeats its command.
        group: all ranks.
        rank: this rank.
        say: called with the progress, see `verify`.

    Raises:
        CheckpointError: on all ranks, if there are checkpoints but none is intact; errors of
            `Checkpoints.candidates` are raised on the first rank.
    """
    leads = rank == group.ranks[0]
    own = checkpoints.candidates(resume, is_restart) if leads else None
    candidates: Sequence[Path] = group.broadcast_object(own, root=group.ranks[0])
    refusals: list[CheckpointError] = []
    for path in candidates:
        try:
            found = verify(path, group, rank, say)
        except CheckpointError as error:
            refusals.append(error)
            continue
        for refusal in refusals if leads else ():
            log.warning("damaged checkpoint, resuming from %s instead: %s", path, refusal)
        return found
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        raise CheckpointError(
            f"{refusals[0]}; none of the {len(refusals)} checkpoints is intact; to start over, "
            "set checkpoint.resume=never"
        )
    return None


def newest_listed(checkpoints: Checkpoints, resume: str, is_restart: bool) -> Path | None:
    """Return the first checkpoint of `candidates` that has a readable manifest, or None."""
    for path in checkpoints.candidates(resume, is_restart):
        try:
            read_facts(path)
        except CheckpointError:
            continue
        return path
    return None
