"""A headless Chromium, controlled through two pipes.

The messages are those of the Chrome DevTools Protocol, each ended by a zero byte
(https://chromedevtools.github.io/devtools-protocol/).
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LIMIT_S = 60.0  # maximum time for a response


def found_browser():
    """Return the path of a Chromium executable, or None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browser(folder):
    """Start a browser with its profile in `folder`; yield its only page."""
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    # The browser reads file descriptor 3 and writes 4; the shell connects both to the pipes.
    command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    flags = [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        # Run frames in the process of the page, so that their events are received.
        "--disable-features=IsolateSandboxedIframes,IsolateOrigins,site-per-process",
        *("--hide-scrollbars", f"--user-data-dir={folder}", "--remote-debugging-pipe"),
    ]
    process = subprocess.Popen(
        ["bash", "-c", command, found_browser(), *flags, "about:blank"],
        pass_fds=(to_browser, from_browser),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(from_us, to_us)
    finally:
        os.close(from_us)
        os.close(to_us)
        process.terminate()
        process.wait(LIMIT_S)


class Page:
    """The page of a browser; `events` contains all events received, in order."""

    def __init__(self, write, read):
        self._write, self._read = write, read
        self._rest, self._sent = b"", 0
        self._session = None
        self.events = []
        (target, *_) = [
            each for each in self.ask("Target.getTargets")["targetInfos"] if each["type"] == "page"
        ]
        told = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = told["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{part}.enable")

    def ask(self, method, **values):
        """Send a command and return its result; raise AssertionError if the browser rejects it."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": values}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next(time.monotonic() + LIMIT_S)
            if told.get("id") == self._sent:
                assert "error" not in told, f"{method}: {told['error']}"
                return told["result"]

    def _next(self, until):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser said nothing for {LIMIT_S:g} s"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser ended"
            self._rest += more
        line, self._rest = self._rest.split(b"\0", 1)
        told = json.loads(line)
        if "method" in told:
            self.events.append(told)
        return told

    def open(self, path, *, width, height, dark):
        """Show a file on a screen of `width` x `height` pixels, in light or dark mode."""
        self.events.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        screen = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.ask("Emulation.setDeviceMetricsOverride", **screen, mobile=width < 600)
        self.ask("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + LIMIT_S
        while not self.named("Page.loadEventFired"):
            self._next(until)
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")

    def named(self, method):
        """Return the parameters of all events of a method since the page was opened."""
        return [each["params"] for each in self.events if each["method"] == method]

    def frames(self):
        """Return the ids of the script contexts of the page and its frames, the page first."""
        contexts = [each["context"] for each in self.named("Runtime.executionContextCreated")]
        usable = [each["id"] for each in contexts if each["auxData"].get("isDefault")]
        gone = {
            each["executionContextId"] for each in self.named("Runtime.executionContextDestroyed")
        }
        return [each for each in usable if each not in gone]

    def run(self, words, context=None):
        """Return the value of a JavaScript expression; wait if the value is a promise."""
        more = {} if context is None else {"contextId": context}
        told = self.ask(
            "Runtime.evaluate", expression=words, returnByValue=True, awaitPromise=True, **more
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def faults(self):
        """Return errors that the browser reported: exceptions, log entries and console errors."""
        thrown = [each["exceptionDetails"] for each in self.named("Runtime.exceptionThrown")]
        logged = [each["entry"] for each in self.named("Log.entryAdded")]
        said = [each for each in self.named("Runtime.consoleAPICalled") if each["type"] == "error"]
        return [*thrown, *(each for each in logged if each["level"] == "error"), *said]

    def asked_for(self):
        """Return the URLs that the page has requested."""
        return [each["request"]["url"] for each in self.named("Network.requestWillBeSent")]

    def picture(self):
        """Return a PNG screenshot as bytes."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])
