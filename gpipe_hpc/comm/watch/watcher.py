"""The helper process of a rank: it looks at its rank, listens to neighbours, and passes news on."""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from gpipe_hpc.comm.joining.secret import Secret
from gpipe_hpc.comm.watch.display import View
from gpipe_hpc.comm.watch.lines import Line, Message
from gpipe_hpc.comm.watch.link import Link
from gpipe_hpc.comm.watch.neighbours import dials, neighbours
from gpipe_hpc.comm.watch.own_process import OwnProcess
from gpipe_hpc.comm.watch.talk import Talk

BEAT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 0.25
_PAUSE_S: Final = 2.0  # a turn that takes longer: this process itself did not run
_SUSPECT_SHARE: Final = 0.4  # of silence_s, after which all are told that a rank is silent
_SUSPECT_BEATS: Final = 2.5
_RECONNECT_S: Final = 3.0
_GREETING_S: Final = 5.0
_REDIAL_S: Final = 0.5
_UNREACHED_S: Final = 30.0
_LINGER_S: Final = 2.0
_STACK_S: Final = 2.0
_ANSWER_AGAIN_S: Final = 2.0
_KILL_S: Final = 12.0  # from news of a failure to the end of a rank that does not end by itself
_MAX_STRANGERS: Final = 64
_MAX_STACK: Final = 6000
_MAX_DOING: Final = 200
_MAX_WAITING: Final = 3
_MAX_HEARD: Final = 4000
_LASTING: Final = frozenset({"failure", "lost"})


@dataclass
class _Rank:
    """What the rank has said of itself, and since when it has said nothing new."""

    count: int = -1
    text: str = "starting"
    waits: bool = False
    inside: bool = False  # within something that all ranks do together
    ends: bool = False  # may be ended by force once the run has failed
    limit_s: float = float("inf")
    changed_s: float = 0.0
    num_said: int = 0  # times that its lack of progress was said, each twice as late
    stack_asked_s: float | None = None
    answered_s: float = float("-inf")
    stopped_s: float | None = None
    is_suspect: bool = False
    has_left: bool = False
    hung_up_s: float | None = None  # when its connection ended


class Watcher:
    """One rank's watcher. `line` leads to the rank, `own` is its process."""

    def __init__(self, line: Line, own: OwnProcess) -> None:
        self._line, self._own = line, own
        self._rank, self._host = -1, socket.gethostname()[:64]
        self._secret = Secret(b"", "nothing yet")
        self._silence_s = float("inf")
        self._stack_signal: int | None = None
        self._stack_file = ""
        self._links: dict[int, Link] = {}
        self._strangers: list[Talk] = []
        self._listeners: list[socket.socket] = []
        self._told = _Rank()
        self._view: View | None = None
        # Names of news and the numbers of single messages, and when they were heard.
        self._heard: dict[str, float] = {}
        self._num_news = 0
        self._lasting: list[Message] = []  # for neighbours that come later
        self._failed_s: float | None = None
        self._ends_s: float | None = None
        self._next_beat_s = 0.0
        self._began_s = self._now_s = time.monotonic()
        self._has_warned = False

    def run(self) -> None:
        """Watch until the rank has left or is gone, and the others know."""
        try:
            while not self._is_done():
                self._turn()
        finally:
            for line in (self._line, *(talk.line for talk in self._talks())):
                line.close()
            for listener in self._listeners:
                listener.close()
            if self._view is not None:
                self._view.close()

    def _is_done(self) -> bool:
        if self._ends_s is None:
            return False
        return self._now_s >= self._ends_s or (self._told.has_left and not self._talks())

    def _turn(self) -> None:
        """Wait for something to happen, at most for a moment, and act on it."""
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
        self._drop_ended()
        self._forget_old_news()
        if self._rank >= 0:
            self._look_at_rank()
            self._dial()
            self._beat()
            self._judge()

    def _interests(self) -> Iterator[tuple[int, int, Callable[[], None]]]:
        if self._line.is_open:
            yield self._line.fileno(), _mask(self._line), self._hear_rank
        if self._own.handle is not None and not self._told.has_left and self._failed_s is None:
            yield self._own.handle, select.POLLIN, self._look_at_rank
        for listener in self._listeners:
            yield listener.fileno(), select.POLLIN, partial(self._accept, listener)
        for talk in self._talks():
            yield talk.line.fileno(), _mask(talk.line), partial(self._hear, talk)

    def _talks(self) -> list[Talk]:
        own = [link.talk for link in self._links.values() if link.talk is not None]
        return [talk for talk in (*own, *self._strangers) if talk.line.is_open]

    def _forgive(self, pause_s: float) -> None:
        """A time in which this process did not run (suspended with all others) proves nothing."""
        if pause_s < _PAUSE_S:
            return
        for link in self._links.values():
            link.forgive(pause_s)
        told = self._told
        told.changed_s += pause_s
        if told.stopped_s is not None:
            told.stopped_s += pause_s

    # What the rank says.

    def _hear_rank(self) -> None:
        self._line.flush()
        for message in self._line.receive():
            self._obey(message)
        if not self._line.is_open:
            self._told.hung_up_s = self._now_s

    def _obey(self, message: Message) -> None:
        match message.get("kind"):
            case "orders":
                self._take_orders(message)
            case "listen":
                self._listen(message)
            case "peer":
                link = self._links[message["rank"]]
                link.address = (message["host"], message["port"])
            case "doing":
                self._note(message)
            case "stack":
                self._say_stuck(message["text"])
            case "failure":
                self._spread({"kind": "failure", "name": "failure", "report": message["report"]})
            case "call":
                self._call()
                self._line.send({"kind": "around", "text": self._around()})
            case "left":
                self._leave()

    def _take_orders(self, message: Message) -> None:
        self._rank, self._silence_s = message["rank"], message["silence_s"]
        self._secret = Secret(bytes.fromhex(message["key"]), "the rank's world")
        self._stack_signal, self._stack_file = message["stack_signal"], message["stack_file"]
        self._view = View(message["display"])
        self._told.changed_s = self._began_s = self._now_s
        for other in neighbours(self._rank, message["size"]):
            self._links[other] = Link(other, dials(self._rank, other))

    def _listen(self, message: Message) -> None:
        """Listen on an address of this machine; answer with the port."""
        host = message["host"]
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family, backlog=_MAX_STRANGERS)
        except OSError as error:
            self._line.send({"kind": "listening", "host": host, "port": 0, "error": str(error)})
            return
        listener.setblocking(False)
        self._listeners.append(listener)
        port = listener.getsockname()[1]
        self._line.send({"kind": "listening", "host": host, "port": port})

    def _note(self, message: Message) -> None:
        told = self._told
        told.inside, told.ends, told.limit_s = (message[k] for k in ("inside", "ends", "limit_s"))
        if message["count"] > told.count:
            told.count, told.changed_s, told.num_said = message["count"], self._now_s, 0
        if message["count"] == told.count:  # else it is older than what the rank shows
            told.text, told.waits = message["text"][:_MAX_DOING], message["waits"]

    def _leave(self) -> None:
        """The rank ends its part in good order, or after a failure that all know."""
        self._told.has_left = True
        for link in self._links.values():
            self._tell(link, {"kind": "left"})
        for talk in self._talks():
            if not talk.is_proven:
                talk.line.close()
        if self._failed_s is None or not self._told.ends:
            # The others hang up when they have heard it.
            self._ends_s = self._now_s + _LINGER_S

    # How the rank is.

    def _look_at_display(self) -> None:
        shown = None if self._view is None else self._view.read()
        told = self._told
        if shown is not None and shown.num_actions > told.count:
            told.count, told.changed_s, told.num_said = shown.num_actions, self._now_s, 0
            told.text, told.waits = shown.text[:_MAX_DOING], False

    def _look_at_rank(self) -> None:
        if self._ends_s is not None:
            return
        self._look_at_display()
        if self._own.has_ended():
            if self._own.has_ended_well():
                self._leave()
            elif not self._told.has_left and self._failed_s is None:
                self._lose(self._rank, self._host, "died", self._own.fate(), self._told.text)
            self._ends_s = self._now_s + (0.0 if self._told.has_left else _LINGER_S)
            return
        hung_up_s = self._told.hung_up_s
        if hung_up_s is not None and self._now_s > hung_up_s + _LINGER_S:
            # It lives without its connection: it has become another program.
            self._ends_s = self._now_s
            return
        self._look_whether_stopped()
        if self._failed_s is not None:
            self._end_rank()
        else:
            self._look_at_progress()

    def _look_whether_stopped(self) -> None:
        told = self._told
        if not self._own.is_stopped():
            if told.stopped_s is not None and told.is_suspect and self._failed_s is None:
                self._warn(f"rank {self._rank} runs again", f"again {self._rank}")
            if told.stopped_s is not None:
                told.changed_s += self._now_s - told.stopped_s
                if self._failed_s is not None:
                    self._failed_s = self._now_s
            told.stopped_s, told.is_suspect = None, False
            return
        if told.stopped_s is None:
            told.stopped_s = self._now_s
        stopped_s = self._now_s - told.stopped_s
        if self._failed_s is not None or told.has_left:
            return
        if stopped_s > self._silence_s:
            fate = _stopped_for(stopped_s)
            self._lose(self._rank, self._host, "stopped", fate, told.text)
        elif stopped_s > _SUSPECT_SHARE * self._silence_s and not told.is_suspect:
            told.is_suspect = True
            name = f"rank {self._rank} on {self._host}"
            suspicion = self._suspicion(self._rank, told.text)
            warning = f"{name} {_stopped_for(stopped_s)}; {suspicion}"
            self._warn(warning, f"silent {self._rank}")

    def _end_rank(self) -> None:
        """End a rank that does not end by itself though the run has failed.

        One that is stopped too: it holds the run's lock, and its launcher waits for it.
        """
        assert self._failed_s is not None, "no failure"
        told = self._told
        if not told.ends or self._now_s < self._failed_s + _KILL_S:
            return
        how = "stopped by a signal" if told.stopped_s is not None else "stuck"
        with contextlib.suppress(OSError):
            text = (
                f"gpipe_hpc: rank {self._rank}: expected to end within {_KILL_S:.0f} s of the "
                f"failure, got {how} in {told.text}; its watcher ends it now\n"
            )
            os.write(2, text.encode())
        self._own.send(signal.SIGKILL)
        self._ends_s = self._now_s + _LINGER_S

    def _look_at_progress(self) -> None:
        """Say so where the rank lives but does nothing new for long."""
        told = self._told
        unchanged_s = self._now_s - told.changed_s
        if told.stack_asked_s is not None and self._now_s > told.stack_asked_s + _STACK_S:
            self._say_stuck(self._stack_by_signal())
        if told.stopped_s is not None or unchanged_s < told.limit_s * 2**told.num_said:
            return
        told.num_said += 1
        if told.waits:
            self._call()
        elif told.inside:
            self._ask_for_stack()

    def _call(self) -> None:
        """Ask all ranks who holds this one up."""
        news = {"kind": "call", "name": "call", "unchanged_s": self._now_s - self._told.changed_s}
        if self._spread(news, again_s=3.0):
            self._answer(news)

    def _answer(self, call: Message) -> None:
        """Say who may hold others up: this rank if it does nothing new, a silent neighbour."""
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
        for link in self._links.values():
            silent_s = link.silent_s(self._now_s)
            if link.has_left:
                self._fact(link.rank, f"{link.name} has left the run", link.doing)
            elif silent_s > 2.5 * BEAT_S:
                text = f"no sign of life from {link.name} for {silent_s:.0f} s"
                self._fact(link.rank, text, link.doing)

    def _fact(self, rank: int, text: str, doing: str) -> None:
        text = f"{text}; its last action: {doing}"
        self._spread({"kind": "fact", "name": f"fact {rank}", "rank": rank, "text": text}, 3.0)

    def _ask_for_stack(self) -> None:
        if self._told.stack_asked_s is None:
            self._told.stack_asked_s = self._now_s
            self._line.send({"kind": "stack"})

    def _say_stuck(self, stack: str) -> None:
        told = self._told
        if told.stack_asked_s is None:
            return
        told.stack_asked_s, told.answered_s = None, self._now_s
        text = (
            f"rank {self._rank} on {self._host} has made no progress for "
            f"{self._now_s - told.changed_s:.0f} s: {told.text}"
        )
        news = {"kind": "stuck", "rank": self._rank, "text": text, "stack": stack[:_MAX_STACK]}
        self._spread(news | {"name": f"stuck {self._rank}"}, again_s=1.0)

    def _stack_by_signal(self) -> str:
        """Return the stacks as the rank's signal handler writes them, without its interpreter."""
        if self._stack_signal is None:
            return "(its interpreter does not answer)"
        path = Path(self._stack_file)
        try:
            before = path.stat().st_size
            self._own.send(self._stack_signal)
            time.sleep(0.3)
            with path.open("rb") as file:
                file.seek(before)
                text = file.read(_MAX_STACK).decode(errors="replace")
        except OSError as error:
            return f"(no stack: {error})"
        return f"(holds the interpreter's lock)\n{text}"

    # Neighbours.

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            connection.close()
            return
        self._strangers.append(self._talk(connection, None))

    def _talk(self, connection: socket.socket, expected: int | None) -> Talk:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = Line(connection)
        return Talk(line, self._rank, self._host, self._secret, expected, self._now_s)

    def _dial(self) -> None:
        for link in self._links.values():
            pending = link.talk is not None and link.talk.line.is_open
            due = self._now_s > link.dialled_s + _REDIAL_S
            if not link.dials or link.address is None or link.has_left or pending or not due:
                continue
            link.dialled_s = self._now_s
            family = socket.AF_INET6 if ":" in link.address[0] else socket.AF_INET
            connection = socket.socket(family)
            connection.setblocking(False)
            try:
                connection.connect_ex(link.address)
            except OSError:
                connection.close()
                continue
            link.talk = self._talk(connection, link.rank)

    def _hear(self, talk: Talk) -> None:
        was_proven = talk.is_proven
        talk.line.flush()
        messages = talk.receive()
        if talk.is_proven and not was_proven:
            self._welcome(talk)
        if not talk.is_proven:
            return
        assert talk.peer is not None, "proven without a name"
        link = self._links[talk.peer]
        link.heard_s = self._now_s
        for message in messages:
            self._listen_to(link, message)

    def _welcome(self, talk: Talk) -> None:
        """A connection to a neighbour works: it replaces an older one."""
        if talk in self._strangers:
            self._strangers.remove(talk)
        link = self._links.get(-1 if talk.peer is None else talk.peer)
        if link is None:
            talk.line.close()
            talk.is_proven = False
            return
        if link.talk is not None and link.talk is not talk:
            link.talk.line.close()
        link.talk, link.ended_s, link.host = talk, None, talk.host
        talk.line.send(self._beat_message())
        for news in self._lasting:
            talk.line.send(news)
        self._say_links()

    def _drop_ended(self) -> None:
        overdue = self._now_s - _GREETING_S
        for talk in self._talks():
            if not talk.is_proven and talk.began_s < overdue:
                talk.line.close()
        self._strangers = [talk for talk in self._strangers if talk.line.is_open]
        for link in self._links.values():
            if link.talk is not None and not link.talk.line.is_open:
                if link.talk.is_proven and link.ended_s is None:
                    link.ended_s = self._now_s
                link.talk = None
                self._say_links()

    def _say_links(self) -> None:
        """Tell the rank whether all neighbours can be reached."""
        links = self._links.values()
        self._line.send(
            {"kind": "links", "all": all(link.is_up or link.has_left for link in links)}
        )

    def _beat(self) -> None:
        if self._now_s < self._next_beat_s or self._told.has_left or self._own.has_ended():
            return
        self._next_beat_s = self._now_s + BEAT_S
        message = self._beat_message()
        for link in self._links.values():
            self._tell(link, message)

    def _beat_message(self) -> Message:
        return {"kind": "beat", "doing": self._told.text}

    def _tell(self, link: Link, message: Message) -> None:
        if link.is_up and link.talk is not None:
            link.talk.line.send(message)

    def _listen_to(self, link: Link, message: Message) -> None:
        match message.get("kind"):
            case "beat":
                link.doing = str(message.get("doing"))[:_MAX_DOING]
            case "left":
                link.has_left = True
                if link.talk is not None:
                    link.talk.line.close()
                self._say_links()
            case "call":
                if self._spread(message, again_s=3.0, source=link):
                    self._answer(message)
            case "failure" | "lost" | "warning" | "fact" | "stuck":
                self._spread(message, again_s=1.0, source=link)

    def _judge(self) -> None:
        """Find neighbours that are silent."""
        if self._failed_s is not None or self._told.has_left or self._ends_s is not None:
            return
        # More than two beats: one may come late.
        suspect_s = max(_SUSPECT_SHARE * self._silence_s, _SUSPECT_BEATS * BEAT_S)
        for link in self._links.values():
            if link.has_left:
                continue
            if link.ended_s is not None:
                if self._now_s > link.ended_s + _RECONNECT_S:
                    fate = "is gone with the helper that watches it"
                    self._lose(link.rank, link.host, "died", fate, link.doing)
                continue
            silent_s = link.silent_s(self._now_s)
            if silent_s > self._silence_s:
                fate = f"gave no sign of life to rank {self._rank} for {silent_s:.0f} s"
                self._lose(link.rank, link.host, "silent", fate, link.doing)
            elif silent_s > suspect_s and not link.is_suspect:
                link.is_suspect = True
                fate = f"gives no sign of life to rank {self._rank} for {silent_s:.0f} s"
                warning = f"{link.name} {fate}; {self._suspicion(link.rank, link.doing)}"
                self._warn(warning, f"silent {link.rank}")
            elif link.is_suspect and silent_s < 2 * BEAT_S:
                link.is_suspect = False
                self._warn(f"{link.name} gives signs of life again", f"again {link.rank}")
        self._warn_of_unreached()

    def _suspicion(self, rank: int, doing: str) -> str:
        return (
            f"its last action: {doing}; {self._waiting(rank)}all ranks end if that lasts "
            f"{self._silence_s:g} s (comm.silence_s)"
        )

    def _warn_of_unreached(self) -> None:
        if self._has_warned or self._now_s < self._began_s + _UNREACHED_S:
            return
        self._has_warned = True
        names = [link.name for link in self._links.values() if link.heard_s is None]
        if names:
            text = (
                f"rank {self._rank} on {self._host} is not in touch with {', '.join(names)} after "
                f"{_UNREACHED_S:.0f} s: if one of them falls silent, that is found only after "
                f"comm.timeout_s; let the ranks reach one another on any port"
            )
            self._line.send({"kind": "warning", "text": text})

    # News.

    def _lose(self, rank: int, host: str, what: str, fate: str, doing: str) -> None:
        news = {"kind": "lost", "name": f"lost {rank}", "rank": rank, "host": host, "what": what}
        self._spread(news | {"fate": fate, "doing": doing, "waiting": self._waiting(rank)})

    def _warn(self, text: str, name: str) -> None:
        self._spread({"kind": "warning", "name": name, "text": text}, again_s=self._silence_s / 2)

    def _waiting(self, silent: int) -> str:
        """Return who waits here and at the neighbours, but for the silent one itself."""
        doings = {self._rank: self._told.text}
        doings |= {link.rank: link.doing for link in self._links.values() if not link.has_left}
        doings.pop(silent, None)
        # Those that wait for the silent one itself first.
        texts = sorted(doings.items(), key=lambda each: not each[1].endswith(f"for rank {silent}"))
        found = [f"rank {rank} ({text})" for rank, text in texts if "waiting for" in text]
        return f"held up: {', '.join(found[:_MAX_WAITING])}; " if found else ""

    def _around(self) -> str:
        """Return what the neighbours that can be heard do."""
        links = [link for link in self._links.values() if not link.has_left]
        return ", ".join(f"rank {link.rank}: {link.doing}" for link in links[:8])

    def _forget_old_news(self) -> None:
        if len(self._heard) > _MAX_HEARD:
            kept = sorted(self._heard.items(), key=lambda entry: entry[1])[_MAX_HEARD // 2 :]
            self._heard = dict(kept)

    def _spread(
        self, news: Message, again_s: float = float("inf"), source: Link | None = None
    ) -> bool:
        """Pass news on to the rank and the neighbours, unless heard before; say if they are new.

        The same may be news again after `again_s` seconds.
        """
        if "id" not in news:
            self._num_news += 1
            news = news | {"id": f"{self._rank}.{self._num_news}"}
        name, number = str(news.get("name"))[:64], str(news["id"])[:64]
        last_s = self._heard.get(name, float("-inf"))
        if number in self._heard or self._now_s < last_s + again_s:
            return False
        self._heard[name] = self._heard[number] = self._now_s
        if news["kind"] in _LASTING:
            self._lasting.append(news)
            self._failed_s = self._now_s if self._failed_s is None else self._failed_s
        if news["kind"] != "call":
            self._line.send(news)
        for link in self._links.values():
            if link is not source:
                self._tell(link, news)
        return True


def _stopped_for(stopped_s: float) -> str:
    return f"has been stopped for {stopped_s:.0f} s, by a signal (SIGSTOP) or a debugger"


def _mask(line: Line) -> int:
    return select.POLLIN | (select.POLLOUT if line.has_unsent else 0)


def main() -> None:
    """Be the watcher of the process whose socket and number the command line gives."""
    descriptor, pid = (int(word) for word in sys.argv[-2:])
    # What is sent to all processes of a job is meant for the ranks.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    Watcher(Line(socket.socket(fileno=descriptor)), OwnProcess(pid)).run()
