"""Chromium without a window, driven over the DevTools protocol on a pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


class Browser:
    """A tab. `faults`: what the console and the page's errors said since `open`."""

    def __init__(self, seconds: float = 60):
        self.seconds = seconds
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self.to = os.pipe()
        self.back, back_write = os.pipe()
        # Chromium reads descriptor 3 and writes 4.
        command = f'exec "$0" "$@" 3<&{to_read} 4>&{back_write}'
        flags = (*FLAGS, f"--user-data-dir={self.profile.name}", "about:blank")
        self.process = subprocess.Popen(
            ["bash", "-c", command, str(BROWSER), *flags],
            pass_fds=(to_read, back_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(back_write)
        self.buffer, self.number, self.session, self.faults = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (got := self._receive()).get("id") != self.number:
            self._event(got)
        if "error" in got:
            raise RuntimeError(f"{method}: {got['error']}")
        return got["result"]

    def open(self, path: Path, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        """Loads a file and waits until its script has run."""
        self.faults = []
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        end = time.monotonic() + self.seconds
        while not self.run("document.documentElement?.dataset.ready !== undefined"):
            if time.monotonic() > end:
                raise TimeoutError(f"the page's script did not end: {self.faults}")
            time.sleep(0.02)
        self.settle()

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        got = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in got:
            raise RuntimeError(f"{expression}: {got['exceptionDetails']}")
        return got["result"].get("value")

    def settle(self) -> None:
        """Waits for two frames, after which what was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def key(self, key: str, code: int, text: str = "", modifiers: int = 0) -> None:
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)
        self.settle()

    def mouse(self, x: float, y: float, click: bool = False) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def screenshot(self, path: Path, whole: bool = True) -> None:
        got = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(got["data"]))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(self.seconds)
        os.close(self.to)
        os.close(self.back)
        self.profile.cleanup()

    def _event(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.faults.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" or method == "Log.entryAdded":
            self.faults.append(json.dumps(params))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            if not select.select([self.back], [], [], self.seconds)[0]:
                raise TimeoutError(f"Chromium did not answer within {self.seconds} s")
            if not (data := os.read(self.back, 1 << 20)):
                raise RuntimeError("Chromium ended")
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)
