"""Take the pictures of docs/guide/dashboard.md from a running server.

    python tools/make_screenshots.py demo-workspace

Works on copies of a trained workspace, with a fresh ledger each: one with a budget for a day, one whose budget is gone.
A few keys send requests meanwhile, so that the charts are not empty. Needs Chromium and the dev extra.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from server.browser import Visit, open_browser  # noqa: E402

TITLES = (
    *("Clinic note: gallstones", "Nursing note: multiple sclerosis", "Discharge letter: transient ischaemic attack"),
    *("Clinic note: high blood pressure", "Telephone call: sinusitis", "Clinic note: rheumatoid arthritis"),
)
PROMPTS = tuple(f"[synthetic note]\n{title}\n" for title in TITLES)
CLIENTS = {"ward-3": 2, "discharge-letters": 1, "research": 1}
QUOTAS = {"ward-3": 9_000, "discharge-letters": 4_000}


@dataclass(frozen=True)
class Deployment:
    """A running server and its keys."""

    address: str
    keys: dict[str, str]

    def post(self, path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request with the key of this client."""
        headers = {"authorization": f"Bearer {self.keys[key]}", "content-type": "application/json"}
        request = urllib.request.Request(self.address + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def complete(self, key: str, prompt: str, tokens: int) -> dict[str, Any]:
        """One completion."""
        return self.post("v1/completions", key, {"model": "clinic", "prompt": prompt, "max_tokens": tokens})


def command(*arguments: str) -> str:
    """Run paclm and return what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "paclm", *arguments], check=True, capture_output=True, text=True
    ).stdout


def copy_workspace(source: Path, target: Path, **mechanism: str) -> None:
    """A copy without its deployment, and with these settings in [mechanism]."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("curator", "study"))
    (target / "curator").mkdir(mode=0o700)
    settings = (target / "paclm.toml").read_text()
    for name, value in mechanism.items():
        settings, count = re.subn(rf"(?m)^#? ?{name} = .*$", f'{name} = "{value}"', settings, count=1)
        if not count:
            raise SystemExit(f"{target / 'paclm.toml'} has no line for {name}.")
    (target / "paclm.toml").write_text(settings)


@contextlib.contextmanager
def serving(workspace: Path) -> Iterator[Deployment]:
    """`paclm serve` on a free port."""
    keys = {"operator": command("keys", "add", str(workspace), "operator", "--admin", "--json")}
    for name in CLIENTS:
        quota = ["--quota", str(QUOTAS[name])] if name in QUOTAS else []
        keys[name] = command("keys", "add", str(workspace), name, *quota, "--json")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A separate state folder: ledgers of earlier copies are not past deployments.
    environment = {**os.environ, "PACLM_STATE_DIR": str(workspace.parent / "state")}
    serve = [sys.executable, "-m", "paclm", "serve", str(workspace), "--port", str(port)]
    server = subprocess.Popen(serve, env=environment)
    address = f"http://127.0.0.1:{port}/"
    try:
        wait_until_healthy(address, server)
        yield Deployment(address, {name: json.loads(text)["key"] for name, text in keys.items()})
    finally:
        server.terminate()
        server.wait(60)


def wait_until_healthy(address: str, server: subprocess.Popen[bytes]) -> None:
    """Return when /health answers; give up when the server has ended."""
    while server.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(address + "health"):
            return
        time.sleep(0.3)
    raise SystemExit(f"The server ended with status {server.returncode} before it answered.")


@contextlib.contextmanager
def clients(deployment: Deployment) -> Iterator[None]:
    """Clients that send requests in waves until the block ends."""
    over = threading.Event()

    def ask(name: str, number: int) -> None:
        turn = number
        while not over.is_set():
            with contextlib.suppress(urllib.error.HTTPError):  # a quota that is used up is part of the picture
                deployment.complete(name, PROMPTS[turn % len(PROMPTS)], 24 + 16 * (turn % 4))
            turn += 1
            over.wait(0.2 if int(time.time() / 25) % 2 else 2.5)

    crew = [
        threading.Thread(target=ask, args=(name, number)) for name, count in CLIENTS.items() for number in range(count)
    ]
    for member in crew:
        member.start()
    try:
        yield
    finally:
        over.set()
        for member in crew:
            member.join()


def save(picture: bytes, path: Path) -> None:
    """As a PNG of 256 colours: these pages have few."""
    from PIL import Image

    image = Image.open(BytesIO(picture)).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")


def shoot_live(deployment: Deployment, out: Path, seconds: float) -> None:
    """A server at work: light, dark, phone, playground, and a refused key."""
    with open_browser() as browser, clients(deployment):
        time.sleep(seconds)
        for name, context in {
            "light": {"viewport": {"width": 1240, "height": 1270}},
            "dark": {"viewport": {"width": 1240, "height": 860}, "color_scheme": "dark"},
            "phone": {"viewport": {"width": 360, "height": 760}, "device_scale_factor": 2, "is_mobile": True},
        }.items():
            page = Visit(browser, deployment.address, **context).open_panel(deployment.keys["operator"])
            page.wait_for_timeout(2500)
            save(page.screenshot(), out / f"dashboard-{name}.png")
        visit = Visit(browser, deployment.address, viewport={"width": 1240, "height": 640})
        visit.log_in("sk-of-somebody-else").locator("#login-error:not(:empty)").wait_for()
        save(visit.page.screenshot(), out / "dashboard-wrong-key.png")
        shoot_playground(browser, deployment, out)


def shoot_playground(browser: Any, deployment: Deployment, out: Path) -> None:
    """A finished answer, from its first line."""
    page = Visit(browser, deployment.address).open_panel(deployment.keys["operator"])
    page.locator("#prompt").fill(PROMPTS[0])
    page.locator("#max-tokens").fill("120")
    page.locator("#temperature").fill("0.3")
    page.locator("#go").click()
    page.locator("#answer[aria-busy=false] .mark").first.wait_for(timeout=240_000)
    page.locator("#answer").evaluate("answer => answer.scrollTo(0, 0)")
    save(page.locator(".playground").screenshot(), out / "dashboard-playground.png")


def shoot_exhausted(deployment: Deployment, out: Path) -> None:
    """The same page when the budget is gone."""
    for prompt in itertools.cycle(PROMPTS):
        if deployment.complete("ward-3", prompt, 60)["privacy"]["public_tokens"]:
            break
    with open_browser() as browser:
        page = Visit(browser, deployment.address, viewport={"width": 1240, "height": 860}).open_panel(
            deployment.keys["operator"]
        )
        page.wait_for_timeout(2500)
        save(page.screenshot(), out / "dashboard-exhausted.png")


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workspace", type=Path, help="A trained workspace, such as `paclm demo` makes.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--seconds", type=float, default=90, help="How long clients ask before the pictures.")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        busy, gone = Path(folder) / "busy" / "clinic", Path(folder) / "gone" / "clinic"
        copy_workspace(options.workspace, busy, per_token="2^-26", total="0.000242")
        copy_workspace(options.workspace, gone, per_token="2^-20", total="0.0002")
        with serving(busy) as deployment:
            shoot_live(deployment, options.out, options.seconds)
        with serving(gone) as deployment:
            shoot_exhausted(deployment, options.out)


if __name__ == "__main__":
    main()
