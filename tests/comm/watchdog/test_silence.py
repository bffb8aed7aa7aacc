"""What a watcher makes of silence, of news that come twice, of old words: by the clock alone."""

import pytest

from gpipe_hpc.comm.watchdog.link import NeighbourLink
from gpipe_hpc.comm.watchdog.news import News
from gpipe_hpc.comm.watchdog.rank_status import RankStatus
from gpipe_hpc.comm.watchdog.silence import ChangeKind, classify_silence

LIMIT_S = 10.0


def signs(link, until_s, limit_s=LIMIT_S):
    """Return what was found when; the last word came at 0, each half second brings a look."""
    looks = [0.5 * number for number in range(int(2 * until_s) + 1)]
    found = [(now_s, classify_silence(link, 0, limit_s, now_s)) for now_s in looks]
    return [(now_s, each.sign) for now_s, each in found if each is not None]


def test_silence_is_spoken_of_once_and_then_ends_the_run():
    found = signs(NeighbourLink(1, dials=True, last_message_s=0.0), 10.5)
    assert found == [(4.5, ChangeKind.SUSPECT), (10.5, ChangeKind.SILENT)]


def test_one_late_beat_is_no_suspicion_however_short_the_limit():
    assert signs(NeighbourLink(1, dials=True, last_message_s=0.0), 2.5, limit_s=3.0) == []


def test_a_neighbour_that_speaks_again_is_said_to():
    link = NeighbourLink(1, dials=True, last_message_s=0.0)
    assert [sign for _, sign in signs(link, 5)] == [ChangeKind.SUSPECT]
    link.last_message_s = 5.0
    again = classify_silence(link, 0, LIMIT_S, 5.5)
    assert again is not None and again.sign is ChangeKind.AGAIN
    assert classify_silence(link, 0, LIMIT_S, 6.0) is None


@pytest.mark.parametrize("change", [{"has_left": True}, {"last_message_s": None}])
def test_who_left_or_was_never_heard_is_not_missed(change):
    link = NeighbourLink(1, **{"dials": True, "last_message_s": 0.0} | change)
    assert signs(link, 60) == []


def test_a_connection_that_ended_may_come_back_for_a_moment():
    found = signs(NeighbourLink(1, dials=True, last_message_s=0.0, ended_s=0.0), 5)
    assert found[0] == (4.5, ChangeKind.HELPER)
    assert (
        signs(NeighbourLink(1, dials=True, last_message_s=0.0, ended_s=0.0), 3, limit_s=3.0) == []
    )


def test_a_pause_of_the_watcher_itself_proves_nothing():
    link = NeighbourLink(1, dials=True, last_message_s=0.0)
    link.exclude_pause(100.0)
    assert classify_silence(link, 0, LIMIT_S, 101.0) is None


def test_news_are_new_once_and_again_after_their_time():
    news = News()
    first = news.number({"kind": "warning", "name": "silent 3"}, 0)
    assert news.is_new(first, 5.0, now_s=1.0)
    assert not news.is_new(first, 0.0, now_s=100.0), "the same message, come by another way"
    second = news.number({"kind": "warning", "name": "silent 3"}, 0)
    assert second["id"] != first["id"]
    assert not news.is_new(second, 5.0, now_s=5.9)
    assert news.is_new(second, 5.0, now_s=6.0)
    assert news.failed_s is None and news.lasting == []


def test_a_failure_lasts_for_those_who_come_later():
    news = News()
    for now_s, kind in ((1.0, "fact"), (2.0, "lost"), (3.0, "failure")):
        assert news.is_new(news.number({"kind": kind, "name": kind}, 0), 1.0, now_s)
    assert news.failed_s == 2.0 and [each["kind"] for each in news.lasting] == ["lost", "failure"]


def test_what_a_rank_said_earlier_does_not_replace_what_it_shows():
    doing = RankStatus()
    said = {"inside": True, "ends": False, "limit_s": 5.0, "waits": False}
    doing.note(said | {"count": 7, "text": "2F0"}, 1.0)
    doing.num_warnings = 3
    doing.note(said | {"count": 6, "text": "1F0"}, 2.0)
    assert (doing.text, doing.changed_s, doing.num_warnings) == ("2F0", 1.0, 3)
    doing.note(said | {"count": 8, "text": "3F0"}, 3.0)
    assert (doing.text, doing.changed_s, doing.num_warnings) == ("3F0", 3.0, 0)
