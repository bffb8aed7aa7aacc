"""Logs: every line names rank and stage; only rank 0 talks on the screen."""

import logging
import warnings

import pytest

from gpipe_hpc.trainer.logs import LogFile, rank_log

LOGGER = logging.getLogger("gpipe_hpc.trainer.anything")


def test_file_of_a_rank_names_rank_and_stages(tmp_path):
    with rank_log(tmp_path, 3, [1, 5]) as path:
        LOGGER.info("hello")
        warnings.warn("careful", UserWarning, stacklevel=1)
    assert path == tmp_path / "logs" / "rank3.log"
    first, second = (line for line in path.read_text().splitlines() if "rank" in line)
    assert "INFO rank 3 stage 1,5 gpipe_hpc.trainer.anything: hello" in first
    assert "WARNING rank 3 stage 1,5" in second and "careful" in second


@pytest.mark.parametrize(("rank", "shown"), [(0, ["told", "warned"]), (1, ["warned"])])
def test_screen_has_warnings_of_all_and_the_rest_of_rank_0(tmp_path, capsys, rank, shown):
    with rank_log(tmp_path, rank, [rank]):
        LOGGER.info("told")
        LOGGER.warning("warned")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rsplit(": ", 1)[1] for line in lines] == shown


def test_a_file_on_a_full_disk_is_told_once_and_the_run_goes_on(tmp_path, capsys):
    """Each message came with a traceback out of our files."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank1.log").symlink_to("/dev/full")
    with rank_log(tmp_path, 1, [1]):
        LOGGER.info("one")
        LOGGER.warning("two")
    told, shown = capsys.readouterr().err.splitlines()
    assert "rank1.log: [Errno 28] No space left on device; its file system is full" in told
    assert shown.endswith("two")


def test_a_message_that_cannot_be_made_is_shown_as_logging_does(tmp_path, capsys):
    file = LogFile(tmp_path / "log")
    file.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    file.close()
    assert "--- Logging error ---" in capsys.readouterr().err


def test_logging_is_as_before_afterwards(tmp_path):
    root, shown = logging.getLogger(), warnings.showwarning
    handlers, level = list(root.handlers), logging.getLogger("gpipe_hpc").level
    with pytest.raises(ZeroDivisionError), rank_log(tmp_path, 0, []) as path:
        LOGGER.info("before the end")
        raise ZeroDivisionError
    assert root.handlers == handlers and logging.getLogger("gpipe_hpc").level == level
    assert warnings.showwarning is shown
    assert "stage -" in path.read_text()
