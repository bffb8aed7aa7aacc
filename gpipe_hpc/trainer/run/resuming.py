"""What a run starts from: the newest checkpoint that is whole, all ranks having looked."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from gpipe_hpc.checkpoint import Verified, read_facts, verify
from gpipe_hpc.comm.collectives.group import Gathering
from gpipe_hpc.errors import CheckpointError
from gpipe_hpc.trainer.run.folder import Checkpoints

log = logging.getLogger("gpipe_hpc.train")


def newest_whole(
    checkpoints: Checkpoints,
    resume: str,
    is_restart: bool,
    group: Gathering,
    rank: int,
    say: Callable[[str], None] = lambda _: None,
) -> Verified | None:
    """Return the checkpoint that `checkpoint.resume` asks for, verified; None to begin anew.

    Where it asks for the newest of a folder and that is damaged, the newest whole one is taken,
    and a warning names both. `say`: as in `verify`. All ranks call it; the first one alone lists
    folders. Raises CheckpointError on all of them if there are checkpoints and none is whole, and
    as `Checkpoints.candidates` on the first.
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
    """Return the checkpoint that `newest_whole` would look at first: its manifest can be read."""
    for path in checkpoints.candidates(resume, is_restart):
        try:
            read_facts(path)
        except CheckpointError:
            continue
        return path
    return None
