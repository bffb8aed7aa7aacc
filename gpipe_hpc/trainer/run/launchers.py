"""Which launcher has started a process: so a start by the same one is known to repeat a command.

torchrun counts how often it has started its workers again, but not where hosts came or went: each
of its agents then stops its workers and starts them anew, with the same count, and an agent that
came later has counted none. But an agent that was there before is there still.
"""

import os
from collections.abc import Mapping

from gpipe_hpc.trainer.run.lock import machine, started


def own_launchers(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the torchrun agent that has started this process, as a text; none on other ranks.

    The first rank of each agent's tells it. It is the parent process, unless a script is between.
    """
    env = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" not in env or env.get("LOCAL_RANK") != "0":
        return frozenset()
    parent = os.getppid()
    return frozenset([f"{machine()} {parent} {started(parent)}"])


def is_one_of_several_agents(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether this process was started by one of several agents of torchrun."""
    env = os.environ if environ is None else environ
    return "TORCHELASTIC_RUN_ID" in env and env.get("GROUP_WORLD_SIZE", "1") != "1"
