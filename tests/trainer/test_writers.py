"""What takes the figures of a run, where it cannot."""

import errno
import threading

import pytest
from tensorboard.summary.writer.record_writer import RecordWriter

from gpipe_hpc.trainer.writers import TensorBoard


def test_what_ends_tensorboards_thread_is_raised_and_not_printed(tmp_path, monkeypatch, until):
    """On a full disk its thread showed a traceback, with files of ours, beside the message."""
    printed = []
    monkeypatch.setattr(threading, "excepthook", lambda what: printed.append(what.exc_value))
    ours = threading.excepthook
    before = set(threading.enumerate())
    board = TensorBoard(tmp_path)
    (thread,) = set(threading.enumerate()) - before

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", refuse)
    board.write(1, {"loss": 1.0})
    until(lambda: not thread.is_alive(), 10, "its thread has ended")
    with pytest.raises(OSError, match="No space left"):
        board.write(2, {"loss": 1.0})
    assert printed == []
    other = threading.Thread(target=refuse)
    other.start()
    other.join()
    assert [str(each) for each in printed] == ["[Errno 28] No space left on device"]
    with pytest.raises(OSError, match="No space left"):
        board.close()
    assert threading.excepthook is ours


def test_boards_closed_in_the_order_they_were_opened_hide_nothing(monkeypatch, tmp_path):
    printed = []
    monkeypatch.setattr(threading, "excepthook", lambda what: printed.append(what.exc_value))
    boards = TensorBoard(tmp_path / "a"), TensorBoard(tmp_path / "b")
    for board in boards:
        board.close()
    of_others = type("Thread", (threading.Thread,), {"__module__": "tensorboard.of_others"})()
    error = OSError("told")
    threading.excepthook(threading.ExceptHookArgs((OSError, error, None, of_others)))
    assert printed == [error]
