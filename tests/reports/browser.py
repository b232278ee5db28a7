"""A headless Chromium, driven by its DevTools protocol over two pipes; no package is needed for that."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync")
QUIET += ("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--hide-scrollbars")
LIMIT_S = 60.0


def find_chromium() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser. Collects what its console says and the requests that it makes."""

    def __init__(self, program: str) -> None:
        self._program = program
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._count = 0
        self._unread = b""
        self._session: str | None = None

    def __enter__(self) -> Self:
        self._folder = tempfile.mkdtemp(prefix="evenly-chromium-")
        read_here, write_there = os.pipe()
        read_there, self._commands = os.pipe()
        self._answers = read_here
        words = [self._program, *QUIET, f"--user-data-dir={self._folder}", "--remote-debugging-pipe", "about:blank"]
        script = f'exec "$@" 3<&{read_there} 4>&{write_there}'  # the protocol uses descriptors 3 and 4
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *words],
            pass_fds=(read_there, write_there),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_there)
        os.close(write_there)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._commands)  # the browser ends when its commands do
        os.close(self._answers)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the answer to a command."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, page: Path, *, width: int, theme: str) -> float:
        """Opens a file at this width and theme; returns the seconds until all of it is drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.messages.clear()
        self.requests.clear()
        began = time.monotonic()
        self.call("Page.navigate", url=page.as_uri())
        while not self.ask("document.readyState === 'complete' && location.protocol === 'file:'"):
            time.sleep(0.01)
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
        return time.monotonic() - began

    def ask(self, expression: str) -> Any:
        """Returns the value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """Saves the whole page as a picture."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + LIMIT_S
        while b"\0" not in self._unread:
            if not select.select([self._answers], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            received = os.read(self._answers, 1 << 20)
            if not received:
                raise RuntimeError("the browser has ended")
            self._unread += received
        text, self._unread = self._unread.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.messages.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(str(params["args"]))
        elif method == "Log.entryAdded":
            self.messages.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
