"""Real clients, from the package registries, against real servers: the table of docs/reference/clients.md, the recipes.

Needs the network once; packages are kept in a cache outside of the repository (PACLM_CLIENTS_CACHE).
"""

import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from client_matrix.matrix import CLIENTS, client_environment, failures, run_client
from client_matrix.packages import environment_of
from client_matrix.page import FEATURES, TOOLS
from client_matrix.servers import running

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.stress
GUIDE = (ROOT / "docs" / "guide" / "clients.md").read_text()
RECIPES = dict(re.findall(r"```\w+\n# file: (\S+)\n(.*?)```", GUIDE, re.DOTALL))


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with pytest.MonkeyPatch.context() as environment:
        for name in ("PACLM_STATE_DIR", "OMP_NUM_THREADS"):  # set by `running`
            environment.setenv(name, "1")
        with running(tmp_path_factory.mktemp("servers")) as servers:
            yield servers


@pytest.mark.parametrize("name", CLIENTS)
def test_no_cell_of_the_table_fails(servers, name):
    result = run_client(name, servers)
    assert not failures(result), result["log"]
    assert result["cells"]
    assert name in TOOLS or set(result["cells"]) <= {*FEATURES, "suite"}


class Recipes:
    """Files of the guide in a folder, with this server's address and model in them."""

    def __init__(self, folder, server):
        self.folder = folder
        self.server = server
        self.replaced = {"http://127.0.0.1:8000": server["root"], "clinic": server["model"]}

    def write(self, name, **more):
        text = RECIPES[name]
        for old, new in {**self.replaced, **more}.items():
            text = text.replace(old, new)
        path = self.folder / name
        path.write_text(text)
        return path

    def environment(self, client):
        programs = environment_of(CLIENTS[client])
        keys = {"PACLM_API_KEY": self.server["key"], "LITELLM_MASTER_KEY": "sk-recipe"}
        found = client_environment(programs, str(self.folder)) | keys | {"LLM_USER_PATH": str(self.folder)}
        return programs, {name: value for name, value in found.items() if name != "PYTHONPATH"}

    def charged(self):
        headers = {"authorization": f"Bearer {self.server['admin']}"}
        return httpx.get(f"{self.server['root']}/v1/admin/overview", headers=headers).json()["tokens"]["charged"]

    def run(self, client, name, **more):
        """Run a recipe; what it prints. It must have been charged for."""
        programs, environment = self.environment(client)
        path, before = self.write(name, **more), self.charged()
        command = [programs / "python", path] if path.suffix == ".py" else [shutil.which("bash"), "-eu", path]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert self.charged() > before
        return done.stdout


@pytest.fixture
def recipes(tmp_path, servers):
    return Recipes(tmp_path, servers[0])


@pytest.mark.parametrize(
    ("client", "name"),
    [
        ("openai-python", "openai_recipe.py"),
        ("langchain", "langchain_recipe.py"),
        ("litellm", "litellm_recipe.py"),
        ("llm", "llm_recipe.sh"),
    ],
)
def test_the_recipes_of_the_guide_run(recipes, client, name):
    recipes.write("extra-openai-models.yaml")
    said = recipes.run(client, name)
    assert re.search(r"\de-\d\d" if name.endswith(".py") else r"Token usage", said), said


def test_the_recipe_of_the_litellm_proxy_runs(recipes):
    programs, environment = recipes.environment("litellm-proxy")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        programs / "litellm",
        "--config",
        recipes.write("litellm.yaml"),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with (recipes.folder / "proxy.log").open("w") as log:
        proxy = subprocess.Popen(command, cwd=recipes.folder, env=environment, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 240
        while not _answers(f"http://127.0.0.1:{port}/health/liveliness"):
            is_starting = proxy.poll() is None and time.monotonic() < until
            assert is_starting, (recipes.folder / "proxy.log").read_text()[-3000:]
            time.sleep(0.5)
        said = recipes.run("openai-python", "litellm_proxy_recipe.py", **{"127.0.0.1:4000": f"127.0.0.1:{port}"})
        assert "charged_nats" in said
    finally:
        proxy.terminate()
        proxy.wait(60)


def _answers(url):
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_every_recipe_of_the_guide_is_run():
    tested = Path(__file__).read_text()
    assert len(RECIPES) >= 7
    assert [name for name in RECIPES if f'"{name}"' not in tested] == []
