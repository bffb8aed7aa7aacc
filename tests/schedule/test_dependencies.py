import pytest

from gpipe_hpc.schedule import (
    Channel,
    Placement,
    ScheduleError,
    arrival,
    channel_of,
    counterpart,
    dependencies,
    parse_action,
    provides,
)


@pytest.mark.parametrize(
    ("action", "needs"),
    [
        ("0F1", []),
        ("1F1", ["0F1"]),
        ("1B1", ["1F1", "1R1", "2I1"]),
        ("1I1", ["1F1", "1R1", "2I1"]),
        ("2B1", ["2F1", "2R1"]),
        ("1W1", ["1I1"]),
        ("1R1", ["1F1"]),
        ("1SEND_F1", ["1F1"]),
        ("1RECV_F1", ["0SEND_F1"]),
        ("1SEND_B1", ["1I1"]),
        ("1RECV_B1", ["2SEND_B1"]),
        ("1REDUCE_GRAD", ["1W0", "1W1"]),
    ],
)
def test_data_flow(action, needs):
    found = dependencies(parse_action(action), num_stages=3, num_microbatches=2)
    assert [str(need) for need in found] == needs


def test_a_full_backward_provides_both_halves():
    assert [str(need) for need in provides(parse_action("1B2"))] == ["1I2", "1W2"]
    assert [str(need) for need in provides(parse_action("1W2"))] == ["1W2"]


@pytest.mark.parametrize(("send", "post"), [("1SEND_F4", "2RECV_F4"), ("1SEND_B4", "0RECV_B4")])
def test_counterparts(send, post):
    assert str(counterpart(parse_action(send))) == post
    assert str(counterpart(parse_action(post))) == send


def test_arrivals():
    arrivals = [str(arrival(parse_action(text))) for text in ("2F0", "2B0", "2I0")]
    assert arrivals == ["2RECV_F0", "2RECV_B0", "2RECV_B0"]


def test_both_halves_of_a_transfer_are_on_one_channel_of_the_micro_batchs_route():
    placement = Placement(((0, 1, 2), (2, 1, 0)), (0, 1))
    for text in ("0SEND_F1", "1RECV_F1"):
        assert channel_of(parse_action(text), placement) == Channel(0, 1, route=1)
    for text in ("2SEND_B0", "1RECV_B0"):
        assert channel_of(parse_action(text), placement) == Channel(2, 1, route=0)


def test_ops_without_data_flow_are_refused():
    with pytest.raises(ScheduleError, match="0OFFLOAD1"):
        dependencies(parse_action("0OFFLOAD1"), 1, 2)
