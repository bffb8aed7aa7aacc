"""Where one rank refuses, all do, and say whose trouble it is."""

import errno
import os
import socket

import pytest

from gpipe_hpc import run_on_threads
from gpipe_hpc.checkpoint.agreement import all_or_none
from gpipe_hpc.errors import CheckpointError

TEXT = "checkpoint x: the folder cannot be created: no room"


@pytest.mark.parametrize(
    ("size", "cause", "named"),
    [
        (2, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        (2, FileNotFoundError(errno.ENOENT, "no such folder"), False),
        (2, ValueError("not what JSON can hold"), False),
        (1, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), False),
    ],
)
def test_a_trouble_of_the_first_ranks_machine_names_it(size, cause, named):
    """A full disk of rank 0 was told on every rank without the host where it is full."""

    def action(rank):
        if rank == 0:
            raise CheckpointError(TEXT) from cause

    def body(world):
        with pytest.raises(CheckpointError) as caught:
            all_or_none(world.world_group, lambda: action(world.rank))
        return str(caught.value)

    expected = f"rank 0 on {socket.gethostname()}: {TEXT}" if named else TEXT
    assert run_on_threads(size, body) == [expected] * size
