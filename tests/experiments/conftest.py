"""What tests on two hosts share."""

import pytest

from experiments.two_hosts import LackingError, TwoHosts


@pytest.fixture
def two_hosts():
    """Return a function that makes a pair of hosts; skip where this machine does not allow it."""
    pairs = []

    def make(rate=100e6, delay_s=0.005, **options):
        pair = TwoHosts(rate, delay_s, **options)
        try:
            pair.__enter__()
        except LackingError as error:
            pytest.skip(f"no two hosts here: {error}")
        pairs.append(pair)
        return pair

    yield make
    for pair in pairs:
        pair.__exit__(None, None, None)
