"""Wheel and sdist as they would be published, and every extra in a clean environment, used for what it is for.

Needs a package index; torch is the pinned one, so give pip an index of CPU builds where there is no GPU.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import urllib.request
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

pytestmark = pytest.mark.stress

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = sorted(set(PROJECT["optional-dependencies"]) - {"dev", "core"})
MACHINE_PATH = re.compile(rb"/(?:" + b"work|home|Users|root" + rb")/[a-z]")
LARGEST = 30 * 2**20  # bytes; the embedded model is 24 MB


class Environment:
    """A virtual environment with nothing in it but what a test installs."""

    def __init__(self, folder):
        self.folder = folder
        if not folder.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PACLM_LEDGER", "PACLM_KEY", "PACLM_WITNESS")
        self.variables = {name: value for name, value in os.environ.items() if name not in hidden}
        self.variables |= {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def copy(self, folder):
        """The same environment elsewhere, its files shared as links: pip replaces files and never writes into them."""
        shutil.copytree(self.folder, folder, symlinks=True, copy_function=os.link)
        return Environment(folder)

    def run(self, *command, fails=False, **options):
        """Run a program of the environment in a folder without sources; returns its output."""
        options = {"cwd": self.folder, "env": self.variables, "timeout": 900, **options}
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
        assert (done.returncode != 0) == fails, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stderr if fails else done.stdout

    def install(self, *what):
        self.run("python", "-m", "pip", "install", "--quiet", *what)

    def paclm(self, *command, **options):
        return self.run("python", "-m", "paclm", *command, **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packaging")
    yield folder
    shutil.rmtree(folder)  # gigabytes


@pytest.fixture(scope="module")
def tools(place):
    environment = Environment(place / "tools")
    environment.install("build", "twine", "kubernetes-validate")
    return environment


@pytest.fixture(scope="module")
def built(place, tools):
    """The sdist, and the wheel that was built from it."""
    tools.run("python", "-m", "build", "--outdir", place / "dist", ROOT)
    (sdist,), (wheel,) = (place / "dist").glob("*.tar.gz"), (place / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def bare(place, built):
    environment = Environment(place / "bare")
    environment.install(built[1])
    return environment


@pytest.fixture(scope="module")
def core(place, bare):
    """Made from the bare package by the command that its error names."""
    environment = bare.copy(place / "core")
    error = environment.paclm("init", "ws", "--corpus", "clinic:40", "--base", "tiny", fails=True)
    (command,) = re.findall(r"Install it with: (pip install .*)", error)
    assert "paclm[core] @ file://" in command
    environment.run("python", "-m", *shlex.split(command))
    return environment


@pytest.fixture(scope="module")
def clinic(place, core):
    """A workspace of two worlds, trained by the extra `core`, with a budget written by the bare package."""
    folder = place / "clinic"
    core.paclm("init", folder, "--corpus", "clinic:24", "--base", "tiny", "--worlds", 2)
    settings = (folder / "paclm.toml").read_text()
    (folder / "paclm.toml").write_text(settings.replace("epochs = 2", "epochs = 1"))
    core.paclm("train", folder, "--json")
    return folder


def test_the_wheel_of_the_checkout_is_the_wheel_of_the_sdist_byte_for_byte(place, tools, built):
    tools.run("python", "-m", "build", "--wheel", "--outdir", place / "direct", ROOT)
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        archive.extractall(place / "unpacked", filter="data")
    (source,) = (place / "unpacked").iterdir()
    tools.run("python", "-m", "build", "--outdir", place / "again", source)
    for other in (place / "direct" / wheel.name, place / "again" / wheel.name):
        assert other.read_bytes() == wheel.read_bytes(), other
    assert (place / "again" / sdist.name).read_bytes() == sdist.read_bytes()


def test_both_are_ready_to_publish(tools, built):
    tools.run("python", "-m", "twine", "check", "--strict", *built)
    sdist, wheel = built
    assert max(path.stat().st_size for path in built) < LARGEST
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (metadata,) = (message_from_bytes(content) for name, content in files.items() if name.endswith("/METADATA"))
    info = f"paclm-{metadata['Version']}.dist-info"
    hook = "paclm-lm-eval.pth"  # runs at every start of Python, so its line is checked by tests/test_package.py
    assert files.pop(hook) == (ROOT / "src" / hook).read_bytes()
    assert {name.split("/")[0] for name in files} == {"paclm", info}
    assert {"paclm/py.typed", f"{info}/licenses/LICENSE"} <= set(files)
    for vendored in ROOT.glob("src/paclm/server/static/vendor/*/LICENSE"):
        assert f"{info}/licenses/{vendored.relative_to(ROOT)}" in files
    assert [name for name in files if "test" in Path(name).parts[1] or name.endswith((".pyc", ".orig"))] == []
    assert [name for name, content in files.items() if MACHINE_PATH.search(content)] == []
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert "Project-URL" not in metadata, "there is no public address yet"
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    known = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert packed - set(known) == {"PKG-INFO"}, "what git ignores, such as keys and workspaces, is not published"
    assert {f"src/{name}" for name in files if name.startswith("paclm/")} <= packed


VALIDATE = """
import sys, yaml, kubernetes_validate
documents = list(yaml.safe_load_all(open(sys.argv[1], encoding="utf-8")))
for document in documents:
    for version in sys.argv[2:]:
        kubernetes_validate.validate(document, version, strict=True)
documents[-1]["spec"]["replica"] = 1
try:
    kubernetes_validate.validate(documents[-1], sys.argv[2], strict=True)
except kubernetes_validate.ValidationError:
    print("valid, and a misspelt key is not")
"""


def test_the_manifest_for_kubernetes_fits_the_schemas_of_its_versions(tools):
    """From 1.29 on ReadWriteOncePod is stable."""
    shown = tools.run("python", "-c", VALIDATE, ROOT / "deploy" / "kubernetes.yaml", "1.29", "1.33", "1.37")
    assert shown == "valid, and a misspelt key is not\n"


def test_the_bare_package_plans_and_replays(bare, clinic):
    planned = json.loads(bare.paclm("plan", "--mia", "51%", "--tokens", "100k", "--json"))
    assert planned["mia_bound"] <= 0.51
    votes = ROOT / "tests" / "fixtures" / "votes" / "wikipedia-greedy.npz"
    replayed = json.loads(bare.paclm("replay", votes, "--release", "gaussian", "--per-token", "2^-16", "--json"))
    assert replayed["worlds"] == 128
    copy = shutil.copytree(clinic, bare.folder / "clinic")
    bare.paclm("plan", "--mia", "51%", "--tokens", "100k", "--write", copy)
    assert "\nper_token = " in (copy / "paclm.toml").read_text()
    bare.run("python", "-m", "pip", "check")


def test_core_fetches_a_real_model(core):
    cache = core.folder / "cache"
    variables = {**core.variables, "PACLM_CACHE_DIR": str(cache)}
    found = json.loads(core.paclm("models", "get", "smollm2", "--json", env=variables))
    assert Path(found["folder"]).is_relative_to(cache)
    core.run("python", "-m", "pip", "check")
    shutil.rmtree(cache)


def use_serve(environment, workspace, request):
    environment.paclm("plan", "--mia", "51%", "--tokens", "100k", "--write", workspace)
    serve_and_ask(environment, ["paclm", "serve", workspace, "--port", "0"])


def use_report(environment, workspace, request):
    environment.paclm("study", "run", workspace, "census", "--preset", "quick")
    environment.paclm("study", "report", workspace)
    assert "<svg" in (workspace / "study" / "report.html").read_text()


def use_dp(environment, workspace, request):
    found = json.loads(environment.paclm("train", workspace, "--what", "dp:8", "--dry-run", "--json"))
    assert found["epsilon"] <= 8


def use_postgres(environment, workspace, request):
    url = request.getfixturevalue("database")
    environment.paclm("plan", "--mia", "51%", "--tokens", "100k", "--write", workspace)
    environment.paclm("generate", workspace, "--prompt", "[synthetic note]", "--max-tokens", "3")
    environment.paclm("ledger", "move", workspace, "--to", url, "--yes")
    shown = environment.paclm("ledger", "show", workspace, "--json", env={**environment.variables, "PACLM_LEDGER": url})
    assert json.loads(shown)["private_tokens"] == 3


def use_otherwise(environment, workspace, request):
    """An extra without an entry below: all of its packages are there and can be imported."""
    program = (
        "import sys\nfrom importlib import import_module\nfrom importlib.metadata import packages_distributions\n"
        "found = packages_distributions().items()\n"
        "names = {name.replace('_', '-'): module for module, those in found for name in those}\n"
        "for name in sys.argv[1:]: import_module(names[name])"
    )
    extra = request.node.callspec.params["extra"]
    wanted = [re.match(r"[\w.-]+", line)[0] for line in PROJECT["optional-dependencies"][extra]]
    environment.run("python", "-c", program, *(name for name in wanted if name != "paclm"))
    environment.paclm("--version")


USES = {"serve": use_serve, "report": use_report, "dp": use_dp, "postgres": use_postgres}


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_installed_alone_is_enough_for_what_it_is_for(extra, request, place, built, bare, core, clinic):
    began = time.monotonic()
    needs_core = any(line.startswith("paclm[") for line in PROJECT["optional-dependencies"][extra])
    environment = (core if needs_core else bare).copy(place / f"extra-{extra}")
    environment.install("--force-reinstall", "--no-deps", built[1])  # the script `paclm` of this environment
    environment.install(f"paclm[{extra}] @ {built[1].as_uri()}")
    environment.run("python", "-m", "pip", "check")
    workspace = shutil.copytree(clinic, environment.folder / "clinic", dirs_exist_ok=True)
    state = {"PACLM_STATE_DIR": str(environment.folder / "state"), "PACLM_CACHE_DIR": str(environment.folder / "cache")}
    environment.variables |= state
    USES.get(extra, use_otherwise)(environment, workspace, request)
    print(json.dumps({"extra": extra, "seconds": round(time.monotonic() - began)}))


def serve_and_ask(environment, command, health=None):
    """Start a server, ask for its health and one answer, and stop it as an orchestrator does."""
    log = environment.folder / "serve.log"
    with log.open("w") as out:
        variables = {**environment.variables, "PYTHONUNBUFFERED": "1"}
        server = subprocess.Popen(
            list(map(str, command)), env=variables, cwd=environment.folder, stderr=out, stdout=out
        )
    try:
        deadline = time.monotonic() + 300
        while not (found := re.search(r"(http://[\d.]+:\d+)/v1", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        url = found[1]
        if health is not None:
            environment.run(*(word.replace("http://127.0.0.1:8000", url) for word in health))
        with urllib.request.urlopen(f"{url}/health", timeout=30) as reply:
            assert json.load(reply)["status"] == "ok"
        key = re.search(r"paclm-[\w-]{20,}", log.read_text())
        model = re.search(r"\(model ([\w-]+)\)", log.read_text())
        body = json.dumps({"model": model[1], "prompt": "[synthetic note]", "max_tokens": 2}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {key[0] if key else 'none'}"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=60
        ) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] == 2
    finally:
        server.terminate()
        status = server.wait(60)
    assert status == 0, log.read_text()


def test_the_steps_of_the_containerfile_build_an_image_that_serves(place, clinic):
    """Its COPY, RUN, ENV, HEALTHCHECK and CMD on this machine: other paths, and no user of its own."""
    text = re.sub(r"^#.*\n", "", (ROOT / "deploy" / "Containerfile").read_text(), flags=re.M)
    build, final = re.split(r"^FROM .*\n", re.sub(r"\\\n\s*", " ", text), flags=re.M)[1:]
    root = place / "image"
    (root / "build").mkdir(parents=True)
    (root / "workspace").mkdir()

    def here(line):
        return re.sub(r"(?<![\w.])/(opt|cache|workspace|witness)\b", lambda found: f"{root}/{found[1]}", line)

    for line in re.findall(r"^COPY (.*)$", build, flags=re.M):
        for name in line.split()[:-1]:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, root / "build" / name)
    (steps,) = re.findall(r"^RUN (.*)$", build, flags=re.M)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    python = Path(sys.executable).parent
    variables |= {"PATH": f"{python}:{os.environ['PATH']}", "PIP_OPTIONS": ""}
    done = subprocess.run(["sh", "-ec", here(steps)], cwd=root / "build", env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.rmtree(root / "build")  # the image has no sources
    image = Environment(root / "opt" / "paclm")
    given = dict(word.partition("=")[::2] for word in re.findall(r"^ENV (.*)$", final, flags=re.M)[0].split())
    image.variables |= {name: here(value).replace("$PATH", variables["PATH"]) for name, value in given.items()}
    shutil.copytree(clinic, root / "workspace", dirs_exist_ok=True)
    image.paclm("plan", "--mia", "51%", "--tokens", "100k", "--write", root / "workspace")
    (command,) = (json.loads(line) for line in re.findall(r"^CMD (.*)$", final, flags=re.M))
    command = [here(word).replace("0.0.0.0", "127.0.0.1") for word in command]
    command[command.index("--port") + 1] = "0"
    (health,) = (json.loads(line) for line in re.findall(r"^\s*HEALTHCHECK .*?CMD (\[.*\])$", final, flags=re.M))
    serve_and_ask(image, command, health)
    written = {path.relative_to(root).parts[0] for path in root.iterdir()}
    assert written <= {"opt", "cache", "workspace", "witness"}
