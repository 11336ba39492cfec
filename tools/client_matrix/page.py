"""The page of the documentation, from the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "tools" / "client_matrix" / "results.json"
PAGE = _ROOT / "docs" / "reference" / "clients.md"

FEATURES = {
    "models": "list of models",
    "completion": "completion",
    "chat": "chat",
    "multi_turn": "second turn with the returned message appended",
    "stream": "streaming",
    "stream_usage": "usage at the end of a stream",
    "stop": "16 stop strings",
    "n": "two answers (`n`)",
    "seed": "`seed`",
    "context": "too long a prompt: the client's own error for it",
    "json_schema": "JSON that fits a schema, whole and streamed",
    "json_object": "JSON mode: any object",
    "tools": "a tool call, whole and streamed, and a turn with its result",
    "structured_outputs": "vLLM's `structured_outputs`",
    "retries": "a validator refuses the answer: asked again, with the error",
    "agent": "a loop of the client's own that calls a tool",
    "forced_choice": "an `enum` under `half`: refused unless the operator allows it",
    "refusal": "images, `top_p`: refused before a charge",
    "logprobs": "`logprobs` (promise `corpus`)",
    "idempotency": "`Idempotency-Key`: repeated, charged once",
    "lost_answer": "answer lost, timeout, retry: charged once",
    "privacy_body": "privacy figures of the body",
    "privacy_headers": "privacy figures of the headers",
    "responses": "`/v1/responses`, whole and streamed",
    "responses_structured": "`/v1/responses` with a schema, and with a tool",
    "empty_key": 'no key needed: `api_key="EMPTY"`',
    "async": "asynchronous, four at once",
}
TOOLS = ("openapi-python-client", "prometheus", "schemathesis")
"""They check the whole server, not a feature each."""

_HEAD = """# Clients and what works with each

<!-- Written by python tools/client_matrix --write. Do not edit. -->

Each cell is the outcome of code that ran the client against `paclm serve` (the embedded model with a chat template;
`half` with a key, `corpus` without): **ok**; the **status** where the server refuses and the
[documentation](../guide/server.md#refusals) says so; **–** where nothing was run, because the client does not offer it
or hands it to openai-python unchanged (instructor, outlines). JSON, tools and agents ran against smollm2 (135 million
parameters) under `half` with `forced_choice = true`: what is checked is the form of an answer and what was charged, not
whether the model picked the right words. Tests of LangChain's suite that ask for the right words are declared with the
reason in `tools/client_matrix/clients/langchain_suite.py`; those that failed were repeated, because the small model
sometimes finds no end of a string, which `max_tokens` then cuts off, and all passed within two repeats. Some cells hold
less than their row says. `structured_outputs`: openai-python and outlines sent patterns, choices and grammars, others
one of them. A tool: `llm` cannot require a call, so it is checked that it sends the tool and ends; instructor returns
the arguments and takes no result. A loop: LangChain's agent ran to its last answer, `runTools` of openai-node to the
result of the tool. Where it says that something is charged once, the ledger
was read before and after. `make stress` runs it again; [recipes](../guide/clients.md) show how to set up each client.
"""


def render(results: dict[str, Any]) -> str:
    """Markdown."""
    clients = [name for name in results if name not in TOOLS]
    lines = [_HEAD]
    for part in (clients[:5], clients[5:]):
        if part:
            lines += [_row(["", *part]), _row(["---", *["---"] * len(part)])]
            for feature, said in FEATURES.items():
                lines.append(_row([said, *(_cell(results[name]["cells"].get(feature)) for name in part)]))
            lines.append("")
    lines += ["## Suites and tools", "", _row(["", "outcome"]), _row(["---", "---"])]
    for name, result in results.items():
        for title, figure in result.get("figures", {}).items():
            lines.append(_row([f"{name}: {title}", figure]))
    lines += ["", "## Versions", "", _row(["client", "version", "run on"]), _row(["---", "---", "---"])]
    lines += [_row([name, result["version"], result["date"]]) for name, result in results.items()]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: dict[str, str] | None) -> str:
    if cell is None:
        return "–"
    return {"ok": "ok", "refused": f"`{cell.get('code', '')}`", "failed": "**failed**"}[cell["outcome"]]
