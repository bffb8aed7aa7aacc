import pytest
from torch.distributed.pipelining.schedules import _Action

from gpipe_hpc.schedule import Action, Op, ScheduleError, build, lower, parse_action

ALL = [*(Action(op, 12, 30) for op in Op), Action(Op.REDUCE_GRAD, 12)]


@pytest.mark.parametrize("action", ALL, ids=str)
def test_text_form_is_read_back(action):
    assert parse_action(str(action)) == action


def test_text_form_is_the_documented_one():
    assert str(Action(Op.F, 2, 0)) == "2F0"
    assert str(Action(Op.SEND_F, 1, 3)) == "1SEND_F3"
    assert str(Action(Op.REDUCE_GRAD, 0)) == "0REDUCE_GRAD"
    assert str(Action(Op.REDUCE_GRAD, 0, 3)) == "0REDUCE_GRAD3"


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0x", "-1F0", "REDUCE_GRAD3", "1f0"])
def test_unreadable_text_is_refused_and_quoted(text):
    with pytest.raises(ScheduleError) as error:
        parse_action(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_torch_reads_every_token_alike(name):
    for row in lower(build(name, ranks=3, microbatches=12), {0: 2, 2: 12}).ranks:
        for action in row:
            theirs = _Action.from_str(str(action))
            assert (theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index) == (
                action.stage,
                action.op.value,
                action.microbatch,
            )
