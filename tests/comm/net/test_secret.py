import os
import threading
from pathlib import Path

import pytest

from gpipe_hpc.comm.net.secret import (
    MIN_SECRET_BYTES,
    SECRET_VARIABLE,
    Secret,
    job_secret,
    secret_for_all,
)
from gpipe_hpc.errors import ConfigError, LaunchError

OURS = Secret(b"ours" * 8, "a test")
THEIRS = Secret(b"them" * 8, "a test")


def test_sealed_values_are_bound_to_secret_and_label():
    sealed = OURS.seal("rank/1", b"here")
    assert OURS.unseal("rank/1", sealed) == b"here"
    changed = sealed[:-1] + b"!"
    for secret, label, value in [
        (THEIRS, "rank/1", sealed),
        (OURS, "rank/2", sealed),
        (OURS, "rank/1", changed),
        (OURS, "rank/1", b""),
        (OURS.derive("beats"), "rank/1", sealed),
    ]:
        with pytest.raises(ConnectionError, match=r"the value is not authenticated"):
            secret.unseal(label, value)


def test_parts_cannot_be_moved_over_their_bounds():
    assert OURS.prove("a", b"bc", b"d") != OURS.prove("a", b"b", b"cd")
    assert OURS.prove("ab", b"c") != OURS.prove("a", b"bc")


def test_a_secret_never_shows_its_key():
    assert "ours" not in repr(OURS)


def test_the_environment_gives_a_secret():
    env = {SECRET_VARIABLE: "0123456789abcdef"}
    secret = job_secret(False, environ=env)
    assert secret is not None
    assert secret.guards
    assert secret == job_secret(True, environ={SECRET_VARIABLE: " 0123456789abcdef\n"})
    assert secret.key != job_secret(False, environ={SECRET_VARIABLE: "another 16 bytes"}).key


def test_a_short_secret_is_refused():
    for text in ("", "x" * (MIN_SECRET_BYTES - 1), "x" * 5000):
        with pytest.raises(ConfigError, match=f"{SECRET_VARIABLE}, expected 16 to 4096 bytes"):
            job_secret(False, environ={SECRET_VARIABLE: text})


def private(path: Path, mode: int = 0o600) -> Path:
    path.write_text("a secret of 22 letters\n")
    path.chmod(mode)
    return path


def test_a_file_gives_a_secret_before_the_environment(tmp_path: Path):
    path = private(tmp_path / "secret")
    secret = job_secret(False, str(path), {SECRET_VARIABLE: "from the environment"})
    assert secret.source == f"comm.secret_file={path}"
    assert secret.key == job_secret(False, environ={SECRET_VARIABLE: "a secret of 22 letters"}).key


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int):
    path = private(tmp_path / "secret", mode)
    with pytest.raises(ConfigError, match=rf"secret: mode {mode:o}.*chmod 600"):
        job_secret(False, str(path))


def test_no_file_a_folder_and_a_pipe_are_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, got in [
        ("missing", "No such file"),
        ("pipe", "wrong file type"),
        (".", "wrong file type"),
    ]:
        with pytest.raises(ConfigError, match=got):
            job_secret(False, str(tmp_path / name))


def test_ranks_of_one_machine_share_a_file_that_one_of_them_makes(tmp_path: Path):
    places = (tmp_path / "nowhere" / "at all", tmp_path / "gpipe_hpc-1")
    found = []
    go = threading.Barrier(8)

    def rank() -> None:
        go.wait(10)
        found.append(job_secret(True, environ={}, places=places))

    threads = [threading.Thread(target=rank) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len({secret.key for secret in found}) == 1
    assert found[0].guards
    folder = places[1]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in folder.iterdir()] == ["secret"], "drafts are removed"
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    assert job_secret(True, environ={}, places=places) == found[0], "the next job reads the same"


def test_a_folder_in_other_hands_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Somebody else made the folder in /tmp first, to be told the secret."""
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(LaunchError, match=rf"mode 777.*set {SECRET_VARIABLE}"):
        job_secret(True, environ={}, places=(tmp_path / "open",))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="wrong file type"):
        job_secret(True, environ={}, places=(tmp_path / "link",))
    (tmp_path / "theirs").mkdir(mode=0o700)
    user = os.stat(tmp_path / "theirs").st_uid
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    if user == 0:  # what root owns is trusted, as root reads everything anyway
        os.chown(tmp_path / "theirs", 12345, -1)
        user = 12345
    with pytest.raises(LaunchError, match=f"it belongs to user {user}, this is"):
        job_secret(True, environ={}, places=(tmp_path / "theirs",))


def test_no_place_for_a_secret_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert job_secret(True, environ={}, places=(tmp_path / "no" / "such",)) is None
    assert "without a secret, because its folder cannot be used" in caplog.text


def test_machines_without_a_secret_have_none():
    assert job_secret(False, environ={}) is None


def test_each_world_has_a_secret_of_its_own():
    one, other = secret_for_all(OURS, b"1" * 32), secret_for_all(OURS, b"2" * 32)
    assert len({one.key, other.key, OURS.key}) == 3
    assert one.guards
    assert one == secret_for_all(OURS, b"1" * 32)
    assert not secret_for_all(None, b"1" * 32).guards
