"""A layout beside the plain training where both lie on a device, which is played."""

import pytest

from gpipe_hpc.config import compose_config
from gpipe_hpc.verify.comparing import Verdict
from gpipe_hpc.verify.run import own_settings, verify_rank
from tests.simulated.world import run_simulated
from tests.verify.test_verify import GPT, LAYOUTS


@pytest.mark.parametrize("layout", ["gpipe", "replicas", "mirrored", "bfloat16", "float16"])
def test_what_lies_on_a_device_is_compared(layout):
    """The command failed on the first GPU it ran on: it compared tensors of the two memories."""
    config = own_settings(compose_config([*GPT, *LAYOUTS[layout]]), 1)
    size = 4 if layout == "replicas" else 2
    report = run_simulated(size, lambda world: verify_rank(config, world)).results[0]
    assert report.is_same, str(report)
    assert {each.verdict for each in report.lines.values()} == {Verdict.EXACT}, str(report)
