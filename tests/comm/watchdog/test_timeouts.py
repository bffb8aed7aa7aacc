import math

import pytest

from gpipe_hpc import run_on_threads
from gpipe_hpc.comm.watchdog.timeouts import MAX_TIMEOUT_S, checked_timeout
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.errors import ConfigError


@pytest.mark.parametrize(
    "value", [1e300, math.inf, -math.inf, math.nan, 0, -1.0, MAX_TIMEOUT_S * 2]
)
def test_times_that_no_wait_takes_are_refused_before_anything_is_opened(value):
    """1e300 became an OverflowError of timedelta; not a number would have waited for ever."""
    with pytest.raises(ConfigError, match=r"timeout_s: expected more than 0 and at most 1000000"):
        start_world(timeout_s=value)
    with pytest.raises(ConfigError, match=r"timeout_s: expected more than 0"):
        run_on_threads(1, lambda world: None, timeout_s=value)


@pytest.mark.parametrize("value", [1e-3, 1, 600.0, MAX_TIMEOUT_S])
def test_other_times_are_taken(value):
    assert checked_timeout(value, "here") == value
