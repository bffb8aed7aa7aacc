"""Watcher process of a rank: monitors the rank, exchanges heartbeats, forwards failure reports."""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.watchdog.json_connection import JsonConnection, Message
from gpipe_hpc.comm.watchdog.link import NeighbourLink
from gpipe_hpc.comm.watchdog.neighbourhood import Neighbourhood
from gpipe_hpc.comm.watchdog.news import News
from gpipe_hpc.comm.watchdog.own_process import OwnProcess
from gpipe_hpc.comm.watchdog.published_status import StatusReader
from gpipe_hpc.comm.watchdog.rank_status import MAX_DOING, RankStatus
from gpipe_hpc.comm.watchdog.silence import (
    BEAT_S,
    SUSPECT_SHARE,
    ChangeKind,
    classify_silence,
    describe_silence,
    is_overdue,
)
from gpipe_hpc.comm.watchdog.watcher_connection import WatcherConnection

_LONGEST_WAIT_S: Final = 0.25
_PAUSE_S: Final = 2.0  # a longer iteration means that this process did not run
_UNREACHED_S: Final = 30.0
_LINGER_S: Final = 2.0
_REJOIN_S: Final = 3.0  # time for a replacement to find its neighbours before it leaves
_STACK_S: Final = 2.0
_ANSWER_AGAIN_S: Final = 2.0
_KILL_S: Final = 12.0  # time from a failure until a rank that does not end by itself is killed
_MAX_STACK: Final = 6000
_MAX_WAITING: Final = 3


class Watcher:
    """One rank's watcher. `line` is the connection to the rank, `own` is the rank's process."""

    def __init__(self, line: JsonConnection, own: OwnProcess) -> None:
        self._line, self._own = line, own
        self._rank, self._host = -1, socket.gethostname()[:64]
        self._silence_s = float("inf")
        self._stack_signal: int | None = None
        self._stack_file = ""
        self._near = Neighbourhood(self._host)
        self._told = RankStatus()
        self._view: StatusReader | None = None
        self._news = News()
        self._ends_s: float | None = None
        self._next_beat_s = 0.0
        self._began_s = self._now_s = time.monotonic()
        self._has_warned = False
        self._is_second = self._leaves = False

    def run(self) -> None:
        """Monitor until the rank has ended or is lost and the other ranks have been informed."""
        try:
            while not self._is_done():
                self._turn()
        finally:
            self._line.close()
            self._near.close()
            if self._view is not None:
                self._view.close()

    def _is_done(self) -> bool:
        if self._ends_s is None:
            return False
        return self._now_s >= self._ends_s or (self._told.has_left and not self._near.connections())

    def _turn(self) -> None:
        """Wait for events, at most for a moment, and handle them."""
        poller = select.poll()
        calls: dict[int, Callable[[], None]] = {}
        for descriptor, mask, call in self._interests():
            poller.register(descriptor, mask)
            calls[descriptor] = call
        happened = poller.poll(1e3 * _LONGEST_WAIT_S)
        before_s, self._now_s = self._now_s, time.monotonic()
        self._forgive(self._now_s - before_s)
        for descriptor, _ in happened:
            calls[descriptor]()
        self._near.drop_ended(self._now_s)
        self._news.forget_old()
        if self._rank >= 0:
            self._look_at_rank()
            self._near.dial(self._now_s)
            self._beat()
            self._judge()
            self._say_links()
        self._leave_if_asked()

    def _interests(self) -> Iterator[tuple[int, int, Callable[[], None]]]:
        if self._line.is_open:
            yield self._line.fileno(), _poll_mask(self._line), self._hear_rank
        if self._own.handle is not None and not self._told.has_left and self._news.failed_s is None:
            yield self._own.handle, select.POLLIN, self._look_at_rank
        for listener in self._near.listeners:
            yield listener.fileno(), select.POLLIN, partial(self._accept, listener)
        for talk in self._near.connections():
            yield talk.line.fileno(), _poll_mask(talk.line), partial(self._hear, talk)

    def _forgive(self, pause_s: float) -> None:
        """Exclude a pause of this process, such as a suspension of the host, from all durations."""
        if pause_s >= _PAUSE_S:
            self._near.exclude_pause(pause_s)
            self._told.exclude_pause(pause_s)

    # Messages of the rank.

    def _hear_rank(self) -> None:
        self._line.flush()
        for message in self._line.receive():
            self._obey(message)
        if not self._line.is_open:
            self._told.disconnected_s = self._now_s

    def _obey(self, message: Message) -> None:
        match message.get("kind"):
            case "orders":
                self._take_orders(message)
            case "listen":
                self._listen(message)
            case "peer":
                link = self._near.links[message["rank"]]
                link.address = (message["host"], message["port"])
            case "doing":
                self._told.note(message, self._now_s)
                self._line.send({"kind": "heard"})
            case "stack":
                self._say_stuck(message["text"])
            case "failure":
                self._spread(message | {"name": "failure"})
            case "call":
                self._call()
                self._line.send({"kind": "around", "text": self._around()})
            case "left":
                self._leaves = True

    def _take_orders(self, message: Message) -> None:
        self._rank, self._silence_s = message["rank"], message["silence_s"]
        secret = Secret(bytes.fromhex(message["key"]), "the rank's world")
        self._stack_signal, self._stack_file = message["stack_signal"], message["stack_file"]
        self._view = StatusReader(message["display"])
        self._told.changed_s = self._began_s = self._now_s
        self._is_second = "is_again" in message
        self._near.begin(self._rank, message["size"], secret)

    def _listen(self, message: Message) -> None:
        """Listen on an address of this machine and report the port."""
        host = message["host"]
        try:
            # A replacement listens on the same port as the previous watcher.
            port = self._near.listen(host, message.get("port", 0))
        except OSError as error:
            self._line.send({"kind": "listening", "host": host, "port": 0, "error": str(error)})
            return
        self._line.send({"kind": "listening", "host": host, "port": port})

    def _leave_if_asked(self) -> None:
        """Leave if the rank has ended; a replacement watcher first connects to the neighbours."""
        if not self._leaves or self._told.has_left:
            return
        is_late = self._now_s > self._began_s + _REJOIN_S
        if not self._is_second or self._near.is_whole or is_late:
            self._leave()

    def _leave(self) -> None:
        """Notify the neighbours that the rank has ended, without failure or after a known one."""
        self._told.has_left = True
        # With its last action, which may be newer than the latest heartbeat.
        self._near.broadcast(self._beat_message() | {"kind": "left"})
        self._near.drop_strangers()
        if self._news.failed_s is None or not self._told.ends:
            # The neighbours close their connections when they have received it.
            self._ends_s = self._now_s + _LINGER_S

    # State of the rank.

    def _look_at_rank(self) -> None:
        if self._ends_s is not None:
            return
        if self._view is not None:
            self._told.update_from(self._view.read(), self._now_s)
        if self._own.has_ended():
            # Exit code 0 in the middle of a step is a failure: a library or layer has exited.
            if self._own.has_ended_well() and not self._told.shows_together:
                self._leave()
            elif not self._told.has_left and self._news.failed_s is None:
                self._lose(self._rank, self._host, "died", self._own.fate(), self._told.text)
            self._ends_s = self._now_s + (0.0 if self._told.has_left else _LINGER_S)
            return
        disconnected_s = self._told.disconnected_s
        if disconnected_s is not None and self._now_s > disconnected_s + _LINGER_S:
            # The process is alive without its connection: it has executed another program.
            self._ends_s = self._now_s
            return
        self._look_whether_stopped()
        if self._news.failed_s is not None:
            self._end_rank()
        else:
            self._look_at_progress()

    def _look_whether_stopped(self) -> None:
        told = self._told
        if not self._own.is_stopped():
            if told.stopped_s is not None and told.is_suspect and self._news.failed_s is None:
                self._warn(f"rank {self._rank} runs again", f"again {self._rank}")
            if told.stopped_s is not None:
                told.changed_s += self._now_s - told.stopped_s
                if self._news.failed_s is not None:
                    self._news.failed_s = self._now_s
            told.stopped_s, told.is_suspect = None, False
            return
        if told.stopped_s is None:
            told.stopped_s = self._now_s
        stopped_s = self._now_s - told.stopped_s
        if self._news.failed_s is not None or told.has_left:
            return
        if stopped_s > self._silence_s:
            fate = _stopped_for(stopped_s)
            self._lose(self._rank, self._host, "stopped", fate, told.text)
        elif stopped_s > SUSPECT_SHARE * self._silence_s and not told.is_suspect:
            told.is_suspect = True
            name = f"rank {self._rank} on {self._host}"
            suspicion = self._suspicion(self._rank, told.text)
            warning = f"{name} {_stopped_for(stopped_s)}; {suspicion}"
            self._warn(warning, f"silent {self._rank}")

    def _end_rank(self) -> None:
        """Kill a rank that does not end by itself after the run has failed.

        This includes a rank stopped by a signal, because it holds the run's lock and its launcher
        waits for it.
        """
        assert self._news.failed_s is not None, "no failure"
        told = self._told
        if not told.ends or self._now_s < self._news.failed_s + _KILL_S:
            return
        how = "stopped by a signal" if told.stopped_s is not None else "stuck"
        with contextlib.suppress(OSError):
            text = (
                f"gpipe_hpc: rank {self._rank}: did not end within {_KILL_S:.0f} s of the failure "
                f"and is {how} in {told.text}; its watcher ends it now\n"
            )
            os.write(2, text.encode())
        self._own.send(signal.SIGKILL)
        self._ends_s = self._now_s + _LINGER_S

    def _look_at_progress(self) -> None:
        """Report a rank that is alive but makes no progress."""
        told = self._told
        unchanged_s = self._now_s - told.changed_s
        if told.stack_requested_s is not None and self._now_s > told.stack_requested_s + _STACK_S:
            self._say_stuck(self._own.stacks(self._stack_signal, self._stack_file, _MAX_STACK))
        if told.stopped_s is not None or unchanged_s < told.limit_s * 2**told.num_warnings:
            return
        told.num_warnings += 1
        if told.waits:
            self._call()
        elif told.inside:
            self._ask_for_stack()

    def _call(self) -> None:
        """Query all ranks which one blocks this rank."""
        news = {"kind": "call", "name": "call", "unchanged_s": self._now_s - self._told.changed_s}
        if self._spread(news, again_s=3.0):
            self._answer(news)

    def _answer(self, call: Message) -> None:
        """Answer what may block other ranks: this rank without progress, or a silent neighbour."""
        told = self._told
        unchanged_s = self._now_s - told.changed_s
        if told.stopped_s is not None:
            fate = _stopped_for(self._now_s - told.stopped_s)
            self._fact(self._rank, f"rank {self._rank} on {self._host} {fate}", told.text)
        elif (
            not told.waits
            and unchanged_s > 0.5 * call["unchanged_s"]
            and self._now_s > told.answered_s + _ANSWER_AGAIN_S
        ):
            self._ask_for_stack()
        for link in self._near.links.values():
            if link.has_left:
                self._fact(link.rank, f"{link.name} has left the run", link.doing)
            elif is_overdue(link, self._now_s):
                silent_s = link.silent_s(self._now_s)
                text = f"no sign of life from {link.name} for {silent_s:.0f} s"
                self._fact(link.rank, text, link.doing)

    def _fact(self, rank: int, text: str, doing: str) -> None:
        text = f"{text}; its last action: {doing}"
        self._spread({"kind": "fact", "name": f"fact {rank}", "rank": rank, "text": text}, 3.0)

    def _ask_for_stack(self) -> None:
        if self._told.stack_requested_s is None:
            self._told.stack_requested_s = self._now_s
            self._line.send({"kind": "stack"})

    def _say_stuck(self, stack: str) -> None:
        told = self._told
        if told.stack_requested_s is None:
            return
        told.stack_requested_s, told.answered_s = None, self._now_s
        text = (
            f"rank {self._rank} on {self._host} has made no progress for "
            f"{self._now_s - told.changed_s:.0f} s: {told.text}"
        )
        news = {"kind": "stuck", "rank": self._rank, "text": text, "stack": stack[:_MAX_STACK]}
        self._spread(news | {"name": f"stuck {self._rank}"}, again_s=1.0)

    # Neighbours.

    def _accept(self, listener: socket.socket) -> None:
        self._near.accept(listener, self._now_s)

    def _hear(self, talk: WatcherConnection) -> None:
        greeting = [self._beat_message(), *self._news.lasting]
        for link, message in self._near.receive(talk, greeting, self._now_s):
            self._listen_to(link, message)

    def _say_links(self) -> None:
        """Notify the rank whether all neighbours are connected, if that may have changed."""
        are_all = self._near.take_change()
        if are_all is not None:
            self._line.send({"kind": "links", "all": are_all})

    def _beat(self) -> None:
        if self._now_s < self._next_beat_s or self._told.has_left or self._own.has_ended():
            return
        self._next_beat_s = self._now_s + BEAT_S
        self._near.broadcast(self._beat_message())

    def _beat_message(self) -> Message:
        return {"kind": "beat", "doing": self._told.text, "helper": os.getpid()}

    def _listen_to(self, link: NeighbourLink, message: Message) -> None:
        match message.get("kind"):
            case "beat" | "left":
                link.doing = str(message.get("doing"))[:MAX_DOING]
                link.helper = str(message.get("helper", ""))[:MAX_DOING]
                if message["kind"] == "left":
                    self._near.part(link)
            case "call":
                if self._spread(message, again_s=3.0, source=link):
                    self._answer(message)
            case "failure" | "lost" | "warning" | "fact" | "stuck":
                self._spread(message, again_s=1.0, source=link)

    def _judge(self) -> None:
        """Warn of silent neighbours, and report those silent for too long as lost."""
        if self._news.failed_s is not None or self._told.has_left or self._ends_s is not None:
            return
        for link in self._near.links.values():
            found = classify_silence(link, self._rank, self._silence_s, self._now_s)
            if found is None:
                continue
            match found.sign:
                case ChangeKind.HELPER | ChangeKind.SILENT:
                    self._lose(link.rank, link.where, found.sign.value, found.text, link.doing)
                    if found.sign is ChangeKind.SILENT:
                        self._lose_all_of(link)
                case ChangeKind.SUSPECT:
                    suspicion = self._suspicion(link.rank, link.doing)
                    warning = f"{link.name} {found.text}; {suspicion}"
                    self._warn(warning, f"silent {link.rank}")
                case ChangeKind.AGAIN:
                    self._warn(f"{link.name} {found.text}", f"again {link.rank}")
        self._warn_of_unreached()

    def _suspicion(self, rank: int, doing: str) -> str:
        return (
            f"its last action: {doing}; {self._waiting(rank)}all ranks end if this continues for "
            f"{self._silence_s:g} s (comm.silence_s)"
        )

    def _warn_of_unreached(self) -> None:
        if self._has_warned or self._now_s < self._began_s + _UNREACHED_S:
            return
        self._has_warned = True
        names = [link.name for link in self._near.links.values() if link.last_message_s is None]
        if names:
            text = (
                f"rank {self._rank} on {self._host} has no connection to {', '.join(names)} after "
                f"{_UNREACHED_S:.0f} s: a failure of one of them would be detected only after "
                f"comm.timeout_s; allow connections between the hosts on all ports"
            )
            self._line.send({"kind": "warning", "text": text})

    # News.

    def _lose(self, rank: int, host: str, what: str, fate: str, doing: str) -> None:
        news = {"kind": "lost", "name": f"lost {rank}", "rank": rank, "host": host, "what": what}
        self._spread(news | {"fate": fate, "doing": doing, "waiting": self._waiting(rank)})

    def _lose_all_of(self, silent: NeighbourLink) -> None:
        """Report all silent ranks of a host together, because the whole host may be cut off."""
        for link in self._near.links.values():
            alike = link is not silent and link.host == silent.host and not link.has_left
            if alike and link.silent_s(self._now_s) > SUSPECT_SHARE * self._silence_s:
                fate = describe_silence(link, self._rank, self._now_s)
                self._lose(link.rank, link.where, ChangeKind.SILENT.value, fate, link.doing)

    def _warn(self, text: str, name: str) -> None:
        self._spread({"kind": "warning", "name": name, "text": text}, again_s=self._silence_s / 2)

    def _waiting(self, silent: int) -> str:
        """Return a text naming this rank and its neighbours if they wait for other ranks."""
        doings = {self._rank: self._told.text}
        doings |= {link.rank: link.doing for link in self._near.links.values() if not link.has_left}
        doings.pop(silent, None)
        # First those that wait for the silent rank itself.
        texts = sorted(doings.items(), key=lambda each: not each[1].endswith(f"for rank {silent}"))
        found = [f"rank {rank} ({text})" for rank, text in texts if "waiting for" in text]
        return f"blocked: {', '.join(found[:_MAX_WAITING])}; " if found else ""

    def _around(self) -> str:
        """Return a text with the activities of connected neighbours."""
        links = [link for link in self._near.links.values() if not link.has_left]
        return ", ".join(f"rank {link.rank}: {link.doing}" for link in links[:8])

    def _spread(
        self, news: Message, again_s: float = float("inf"), source: NeighbourLink | None = None
    ) -> bool:
        """Send a message to the rank and its neighbours if it is new; return whether it is.

        A message with the same name is new again after `again_s` seconds. `source` is the neighbour
        that sent it.
        """
        news = self._news.number(news, self._rank)
        if not self._news.is_new(news, again_s, self._now_s):
            return False
        if news["kind"] != "call":
            self._line.send(news)
        self._near.broadcast(news, without=source)
        return True


def _stopped_for(stopped_s: float) -> str:
    return f"has been stopped for {stopped_s:.0f} s, by a signal (SIGSTOP) or a debugger"


def _poll_mask(line: JsonConnection) -> int:
    return select.POLLIN | (select.POLLOUT if line.has_unsent else 0)


def main() -> None:
    """Run the watcher; the command line ends with its socket's descriptor and the rank's pid."""
    descriptor, pid = (int(word) for word in sys.argv[-2:])
    # Signals sent to all processes of a job are meant for the ranks.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    Watcher(JsonConnection(socket.socket(fileno=descriptor)), OwnProcess(pid)).run()
