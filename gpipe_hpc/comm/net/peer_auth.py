"""Mutual authentication of ranks over newly formed groups."""

from collections.abc import Sequence
from typing import Final

from gpipe_hpc.comm.collectives.group import ControlGroup, rank_names
from gpipe_hpc.comm.net.secret import SECRET_VARIABLE, Secret
from gpipe_hpc.comm.world.source import Runs, Source, merged, run_by, unequal_sources

_MAX_NAMED: Final = 64


class _AuthFindings:
    """What one rank has learned so far: ranks without the secret, and source versions in use."""

    def __init__(self, rank: int, source: Source) -> None:
        self.strangers: set[int] = set()
        self.runs = run_by(rank, source)

    def facts_to_send(self) -> tuple[list[int], Runs]:
        """Return the ranks without the secret (at most 64) and the source versions, for sending."""
        return sorted(self.strangers)[:_MAX_NAMED], self.runs


def authenticate_peers(
    groups: Sequence[ControlGroup],
    below: Sequence[ControlGroup],
    rank: int,
    secret: Secret,
    own: Source,
) -> str:
    """Check that all ranks share the secret and the source code; return an error message or "".

    Ranks authenticate each other level by level of a group hierarchy, so no rank verifies all
    others: every member of a group verifies the proofs of all its members, and its first member
    represents it in the group of the next level.

    Args:
        groups: groups of this rank, from the lowest level up.
        below: groups in which this rank receives the final result from the first member.
        rank: this rank.
        secret: secret with which this rank proves its membership.
        own: source code of this rank.
    """
    heard = _AuthFindings(rank, own)
    proof = secret.prove(f"rank {rank}")
    for group in groups:
        together: Runs = {}
        told = group.all_gather_object((proof, *heard.facts_to_send()))
        for other, (proved, strangers, runs) in zip(group.ranks, told, strict=True):
            if secret.proves(proved, f"rank {other}"):
                heard.strangers.update(strangers)
                together = merged(together, runs)
            else:
                heard.strangers.add(other)
        heard.runs = together
    for group in below:
        strangers, runs = group.broadcast_object(heard.facts_to_send(), group.ranks[0])
        if group.ranks[0] not in heard.strangers:
            heard.strangers.update(strangers)
            heard.runs = runs
    if heard.strangers - {rank}:
        return (
            f"launch: the ranks do not share a secret: rank {rank} has one from {secret.source}, "
            f"{rank_names(sorted(heard.strangers - {rank}))} a different one or none; "
            f"set {SECRET_VARIABLE} to the same value on all ranks"
        )
    return unequal_sources(heard.runs)
