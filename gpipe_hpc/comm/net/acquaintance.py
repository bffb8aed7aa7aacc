"""Ranks make sure of each other over the groups that they have formed."""

from collections.abc import Sequence
from typing import Final

from gpipe_hpc.comm.collectives.group import Gathering, rank_names
from gpipe_hpc.comm.net.secret import SECRET_VARIABLE, Secret
from gpipe_hpc.comm.world.source import Runs, Source, merged, run_by, unequal_sources

_MAX_NAMED: Final = 64


class _Heard:
    """What a rank has heard: who does not prove the secret, and which source lines are run."""

    def __init__(self, rank: int, source: Source) -> None:
        self.strangers: set[int] = set()
        self.runs = run_by(rank, source)

    def told(self) -> tuple[list[int], Runs]:
        """Return it as what travels, of bounded size."""
        return sorted(self.strangers)[:_MAX_NAMED], self.runs


def make_acquaintance(
    groups: Sequence[Gathering], below: Sequence[Gathering], rank: int, secret: Secret, own: Source
) -> str:
    """Return why ranks do not fit together, on all of them; empty if they do.

    `groups`: those in which this rank is, from the lowest level up, and `below`: those in which it
    learns from the first what all know. In each group every member sees the proof of every other.
    So each trusts its group, and who of that speaks for it in the next has proved the secret there.
    """
    heard = _Heard(rank, own)
    proof = secret.prove(f"rank {rank}")
    for group in groups:
        together: Runs = {}
        told = group.all_gather_object((proof, *heard.told()))
        for other, (proved, strangers, runs) in zip(group.ranks, told, strict=True):
            if secret.proves(proved, f"rank {other}"):
                heard.strangers.update(strangers)
                together = merged(together, runs)
            else:
                heard.strangers.add(other)
        heard.runs = together
    for group in below:
        strangers, runs = group.broadcast_object(heard.told(), group.ranks[0])
        if group.ranks[0] not in heard.strangers:
            heard.strangers.update(strangers)
            heard.runs = runs
    if heard.strangers - {rank}:
        return (
            f"launch: the ranks do not share a secret, expected the one that rank {rank} has from "
            f"{secret.source}, got another or none on "
            f"{rank_names(sorted(heard.strangers - {rank}))}; give all ranks one {SECRET_VARIABLE}"
        )
    return unequal_sources(heard.runs)
