"""Identification of the launcher of a process, to recognize that it repeats a command.

torchrun counts restarts of its workers in an environment variable, but not if hosts join or leave:
each agent then restarts its workers with the same count, and the count of a new agent is 0. A
restart is therefore also recognized by an agent that started workers of the previous run.
"""

import os
from collections.abc import Mapping

from gpipe_hpc.trainer.run.lock import machine, started


def own_launchers(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return an identifier of the torchrun agent that started this process, as a set.

    Only the first rank of each agent returns it. The agent is assumed to be the parent process.
    """
    env = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" not in env or env.get("LOCAL_RANK") != "0":
        return frozenset()
    parent = os.getppid()
    return frozenset([f"{machine()} {parent} {started(parent)}"])


def is_one_of_several_agents(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process was started by one of several torchrun agents."""
    env = os.environ if environ is None else environ
    return "TORCHELASTIC_RUN_ID" in env and env.get("GROUP_WORLD_SIZE", "1") != "1"
