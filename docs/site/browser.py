"""A headless Chromium that is driven through two pipes, by its DevTools protocol; nothing has to be installed beside it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
LIMIT = 60.0  # seconds for which an answer is awaited


class BrowserError(Exception):
    """There is no browser, or it has failed."""


class Browser:
    """One page of a browser, in a `with` block.

    Attributes:
        process: the browser.
    """

    def __init__(self) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise BrowserError(
                f"no browser is installed, expected one of {', '.join(PROGRAMS)}; install Debian's chromium"
            )
        self._profile = tempfile.TemporaryDirectory()
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # The protocol is on the descriptors 3 and 4 of the browser.
        command = (
            'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@" --headless=new --remote-debugging-pipe --no-sandbox --disable-gpu '
            '--hide-scrollbars --allow-file-access-from-files --no-first-run "--user-data-dir=$PROFILE"'
        )
        self.process = subprocess.Popen(
            ["bash", "-c", command, "browser", str(commands), str(answers), program],
            pass_fds=(commands, answers), env={**os.environ, "PROFILE": self._profile.name}, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._number, self._session, self._rest = 0, "", b""
        self._events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method} has failed: {answer['error']['message']}")
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], LIMIT)[0]:
                raise BrowserError(
                    f"the browser has not answered for {LIMIT:.0f} s; try again on a machine with less work"
                )
            part = os.read(self._read, 1 << 20)
            if not part:
                raise BrowserError("the browser has ended; try its command by hand")
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message["method"])
        return message

    def open(self, address: str, width: int, height: int, is_dark: bool) -> None:
        """Shows a page, and returns when it has loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = "dark" if is_dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        self.call("Page.navigate", url=address)
        while "Page.loadEventFired" not in self._events:
            self._receive()

    def value(self, expression: str) -> Any:
        """Returns the value of an expression in JavaScript; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        return found["result"].get("value")

    def picture(self, file: Path) -> None:
        """Writes what the page shows as a PNG file."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
