"""openapi-python-client: a client generated from the server's OpenAPI document, without a warning, and then used."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from check import CORPUS, HALF, PROMPT, Server, charged, expect, feature, run

PROGRAM = str(Path(sys.executable).with_name("openapi-python-client"))
figures: dict[str, str] = {}


def _generate(server: Server, name: str) -> Any:
    Path(f"{name}.json").write_text(server.get("/openapi.json"))
    options = ("--path", f"{name}.json", "--output-path", name, "--meta", "none", "--fail-on-warning")
    done = subprocess.run([PROGRAM, "generate", *options], capture_output=True, text=True, check=False)
    expect(done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:])
    sys.path.insert(0, str(Path.cwd()))
    package = import_module(name)
    return package.AuthenticatedClient(base_url=server.root, token=server.key)


def _api(name: str, endpoint: str) -> Any:
    return import_module(f"{name}.api.default.{endpoint}").sync


@feature("half")
def _() -> None:
    client = _generate(HALF, "half_client")
    models = import_module("half_client.models")
    listed = _api("half_client", "models_v1_models_get")(client=client)
    expect([model.id for model in listed.data] == [HALF.model], listed)
    asks = {
        "completions_v1_completions_post": {"prompt": PROMPT},
        "chat_completions_v1_chat_completions_post": {"messages": [{"role": "user", "content": PROMPT}]},
    }
    for endpoint, fields in asks.items():
        kind = models.CompletionAsk if "prompt" in fields else models.ChatAsk
        with charged() as cost:
            body = kind.from_dict({"model": HALF.model, "max_tokens": 8, **fields})
            answer = _api("half_client", endpoint)(client=client, body=body)
        expect(answer.usage.completion_tokens == cost.tokens > 0, answer)
        expect(answer.privacy.charged_nats > 0, answer.privacy)
    figures["clients generated and used"] = "no warning under either promise; models, completion, chat, privacy"


@feature("corpus")
def _() -> None:
    client = _generate(CORPUS, "corpus_client")
    privacy = _api("corpus_client", "privacy_v1_privacy_get")(client=client)
    expect(privacy.to_dict()["promise"] == "corpus", privacy)


run("openapi-python-client", figures=figures)
