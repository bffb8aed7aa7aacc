import pytest

from gpipe_hpc.schedule import (
    Channel,
    Placement,
    arrival,
    channel_of,
    counterpart,
    dependencies,
    parse_action,
    provides,
    skip_of,
)


@pytest.mark.parametrize(
    ("action", "needs"),
    [
        ("0F1", ["0UNSHARD"]),
        ("1F1", ["1UNSHARD", "0F1"]),
        ("1UNSHARD", []),
        ("1B1", ["1F1", "1FETCH1", "1R1", "2I1"]),
        ("1I1", ["1F1", "1FETCH1", "1R1", "2I1"]),
        ("2B1", ["2F1", "2FETCH1", "2R1"]),
        ("1W1", ["1I1"]),
        ("1R1", ["1F1", "1FETCH1"]),
        ("1OFFLOAD1", ["1F1"]),
        ("1FETCH1", ["1OFFLOAD1"]),
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


@pytest.mark.parametrize(
    ("action", "needs"),
    [
        ("0F1", ["0UNSHARD"]),
        ("3F1", ["3UNSHARD", "2F1", "0F1", "1F1"]),
        ("2F1", ["2UNSHARD", "1F1", "0F1"]),
        ("0B1", ["0F1", "0FETCH1", "0R1", "1I1", "2I1", "3I1"]),
        ("1I1", ["1F1", "1FETCH1", "1R1", "2I1", "3I1"]),
        ("0SEND_F1@3", ["0F1"]),
        ("3RECV_F1@0", ["0SEND_F1@3"]),
        ("3SEND_B1@0", ["3I1"]),
        ("0RECV_B1@3", ["3SEND_B1@0"]),
    ],
)
def test_data_flow_over_skips(action, needs):
    skips = ((0, 2), (0, 3), (1, 3))
    found = dependencies(parse_action(action), 4, 2, skips)
    assert [str(need) for need in found] == needs


def test_a_skip_has_channels_and_arrivals_of_its_own():
    placement = Placement(((0, 1, 2, 3), (3, 2, 1, 0)), (0, 1))
    for text in ("0SEND_F1@3", "3RECV_F1@0"):
        assert channel_of(parse_action(text), placement) == Channel(0, 3, route=1)
        assert skip_of(parse_action(text)) == (0, 3)
    for text in ("3SEND_B0@0", "0RECV_B0@3"):
        assert channel_of(parse_action(text), placement) == Channel(3, 0, route=0)
        assert skip_of(parse_action(text)) == (0, 3)
    assert skip_of(parse_action("0SEND_F1")) is None
    assert str(arrival(parse_action("3F1"), 0)) == "3RECV_F1@0"
    assert str(arrival(parse_action("3F1"), 2)) == "3RECV_F1"
    assert str(arrival(parse_action("0I1"), 3)) == "0RECV_B1@3"
    assert str(arrival(parse_action("0I1"), 1)) == "0RECV_B1"
