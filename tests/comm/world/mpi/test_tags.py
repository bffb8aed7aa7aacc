"""Tags of MPI: no two queues share one, in as few bits as MPI promises."""

import pytest

from gpipe_hpc.comm.world.mpi.tags import Tags
from gpipe_hpc.errors import LaunchError

# What the package asks for: channels, those of bytes, late ones, exchanges, and of a device.
CALLERS = [base + queue for base in (0, 2**27, 2**28, 2**29, 2**30) for queue in range(3)]


@pytest.mark.parametrize("highest", [32767, 2**21 - 1, 2**29 - 1, 2**31 - 1])
def test_no_two_queues_share_a_tag_and_none_is_that_of_leaving(highest):
    tags = Tags(highest)
    found = [tags.of(group, tag) for group in range(20) for tag in CALLERS]
    found += [tags.own(group) for group in range(20)]
    assert len(set(found)) == len(found)
    assert min(found) > 0 and max(found) <= highest


def test_what_does_not_fit_is_refused():
    tags = Tags(32767)
    with pytest.raises(LaunchError, match=r"allows 32 channels.*got number 32"):
        tags.of(0, 2**28 + 32)
    num_groups = next(n for n in range(1000) if refuses(tags, n))
    assert num_groups == 63
    assert not refuses(Tags(2**29 - 1), 10_000)


def refuses(tags, group):
    try:
        tags.own(group)
    except LaunchError:
        return True
    return False
