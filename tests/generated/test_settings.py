"""Any generated command either runs or prints one line that says why not; see `cases`."""

import os

import pytest

from tests.generated.cases import BY_TORCHRUN, IN_A_SHELL, drawn
from tests.generated.running import train_first, tried, tried_by_torchrun, tried_command

_FEW, _MANY = range(15), range(15, 1000)
_FEW_IN_A_SHELL, _MANY_IN_A_SHELL = range(2000, 2002), range(2002, 2050)

_ONE_BY_TORCHRUN, _MANY_BY_TORCHRUN = range(3000, 3001), range(3001, 3060)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a run, for cases that read a run."""
    return train_first(tmp_path_factory.mktemp("trained") / "place")


def _all_faults(numbers, trained, tmp_path):
    return {
        f"{number}: {case}\n{found.stderr[-600:]}": wrong
        for number in numbers
        for case in [drawn(number)]
        for found, wrong in [tried(case, tmp_path / str(number), trained)]
        if wrong
    }


def _sampled(few, many):
    """Return case numbers as parameters: `few` are marked slow, `many` are marked product."""
    slow = [pytest.param(each, marks=pytest.mark.slow) for each in few]
    return slow + [pytest.param(each, marks=pytest.mark.product) for each in many]


def test_generated_settings_train_or_are_refused_in_one_line(trained, tmp_path):
    """Regression: numbers as presets, sizes of 20 digits and long paths gave tracebacks."""
    assert not _all_faults(_FEW, trained, tmp_path)


@pytest.mark.product
@pytest.mark.timeout(3600)
def test_a_thousand_generated_settings_train_or_are_refused_in_one_line(trained, tmp_path):
    assert not _all_faults(_MANY, trained, tmp_path)


@pytest.mark.parametrize("number", _sampled(_FEW_IN_A_SHELL, _MANY_IN_A_SHELL))
def test_generated_settings_that_a_shell_types(number, trained, tmp_path, repository):
    case = drawn(number, IN_A_SHELL)
    environ = os.environ | {"PYTHONPATH": str(repository)}
    found, wrong = tried_command(case, tmp_path / "place", trained, environ)
    assert not wrong, (str(case), found)


@pytest.mark.parametrize("number", _sampled(_ONE_BY_TORCHRUN, _MANY_BY_TORCHRUN))
def test_generated_settings_that_torchrun_starts(number, trained, tmp_path, repository):
    """An error found by one rank is printed once per rank, and no rank hangs."""
    case = drawn(number, BY_TORCHRUN)
    environ = os.environ | {"PYTHONPATH": str(repository)}
    found, wrong = tried_by_torchrun(case, tmp_path / "place", trained, environ)
    assert not wrong, (str(case), found)
