"""Real clients, from the package registries, against real servers: the table of docs/reference/clients.md, the recipes.

Needs the network once; packages are kept in a cache outside of the repository (PACLM_CLIENTS_CACHE).
"""

import os
import re
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from client_matrix.matrix import CLIENTS, client_environment, failures, run_client
from client_matrix.packages import environment_of, is_installed
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
    return Recipes(tmp_path, servers[2])  # its model follows instructions, and it allows forced choices


@pytest.mark.parametrize(
    ("client", "name"),
    [
        ("openai-python", "openai_recipe.py"),
        ("openai-python", "openai_structured_recipe.py"),
        ("langchain", "langchain_recipe.py"),
        ("langchain", "langchain_agent_recipe.py"),
        ("litellm", "litellm_recipe.py"),
        ("llm", "llm_recipe.sh"),
        ("instructor", "instructor_recipe.py"),
        ("outlines", "outlines_recipe.py"),
    ],
)
def test_the_recipes_of_the_guide_run(recipes, client, name):
    recipes.write("extra-openai-models.yaml")
    said = recipes.run(client, name)
    shown = {"llm_recipe.sh": r"Token usage", "outlines_recipe.py": r"Person\(name=.* age=\d+\)\n\d{4}-\d\d-\d\d\n"}
    assert re.search(shown.get(name, r"\de-\d\d"), said), said


@contextmanager
def program(command, environment, folder, health):
    """Run a server of somebody else's until the block ends; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "program.log"
    with log.open("w") as output:
        command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
    try:
        until = time.monotonic() + 300
        while not _answers(f"http://127.0.0.1:{port}{health}"):
            is_starting = process.poll() is None and time.monotonic() < until
            assert is_starting, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _answers(url):
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_the_recipe_of_the_litellm_proxy_runs(recipes):
    programs, environment = recipes.environment("litellm-proxy")
    command = [programs / "litellm", "--config", recipes.write("litellm.yaml")]
    with program(command, environment, recipes.folder, "/health/liveliness") as address:
        said = recipes.run("openai-python", "litellm_proxy_recipe.py", **{"127.0.0.1:4000": address})
    assert "charged_nats" in said


OPEN_WEBUI = {"packages": ["torch==2.13.0", "open-webui==0.12.4"]}


@pytest.mark.skipif(
    not is_installed(OPEN_WEBUI) and "PACLM_CLIENTS_LARGE" not in os.environ,
    reason="Open WebUI takes 3 GB: set PACLM_CLIENTS_LARGE=1 to install and run it",
)
def test_the_recipe_of_open_webui_runs_and_asks_nothing_behind_the_conversation(recipes):
    programs = environment_of(OPEN_WEBUI)
    lines = recipes.write("open-webui.env").read_text().replace("$PACLM_API_KEY", recipes.server["key"]).splitlines()
    own = {"WEBUI_AUTH": "False", "OFFLINE_MODE": "True", "DATA_DIR": str(recipes.folder / "data")}
    environment = client_environment(programs, str(recipes.folder)) | own | dict(line.split("=", 1) for line in lines)
    del environment["PYTHONPATH"]
    with (
        program([programs / "open-webui", "serve"], environment, recipes.folder, "/health") as address,
        httpx.Client(base_url=f"http://{address}", timeout=120) as http,
    ):
        token = http.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
        http.headers["authorization"] = f"Bearer {token}"
        model = recipes.server["model"]
        assert [entry["id"] for entry in http.get("/api/models").json()["data"]] == [model]
        before = recipes.charged()
        ask = {"model": model, "messages": [{"role": "user", "content": "How is the patient?"}], "max_tokens": 8}
        answer = http.post("/api/chat/completions", json=ask).json()
        spent = recipes.charged() - before
        assert answer["usage"]["completion_tokens"] == spent > 0
        messages = [*ask["messages"], answer["choices"][0]["message"], *ask["messages"]]
        streamed = http.post("/api/chat/completions", json={**ask, "messages": messages, "stream": True})
        assert streamed.text.rstrip().endswith("data: [DONE]")
        before = recipes.charged()
        for task in ("title", "tags", "follow_up", "auto"):
            http.post(f"/api/v1/tasks/{task}/completions", json={**ask, "prompt": "How", "type": "general"})
        assert recipes.charged() == before


def test_every_recipe_of_the_guide_is_run():
    tested = Path(__file__).read_text()
    assert len(RECIPES) >= 7
    assert [name for name in RECIPES if f'"{name}"' not in tested] == []
