"""lm-eval over HTTP: `local-completions` and `local-chat-completions` on a task of its own, no hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from check import CORPUS, HALF, STOPS, charged, expect, feature, run
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

DOCUMENTS = [{"question": f"Number {number}: how is the patient?", "answer": "well"} for number in range(6)]
TASK: dict[str, Any] = {
    "task": "paclm_local",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(Path("documents.jsonl").absolute())}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": STOPS, "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
Path("documents.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))
Path("tasks").mkdir()
Path("tasks/paclm_local.yaml").write_text(json.dumps(TASK))  # JSON is YAML


def evaluate(kind: str, server: Any, path: str, key: str, **more: Any) -> list[str]:
    """Run the task; the answers."""
    os.environ["OPENAI_API_KEY"] = key
    arguments = {"model": server.model, "base_url": f"{server.url}/{path}", "tokenizer_backend": None, "max_retries": 1}
    found = simple_evaluate(
        model=kind,
        model_args={**arguments, "tokenized_requests": False, **more},
        tasks=["paclm_local"],
        task_manager=TaskManager(include_path="tasks"),
        apply_chat_template="chat" in kind,
        bootstrap_iters=0,
    )
    answers = [sample["resps"][0][0] for sample in found["samples"]["paclm_local"]]
    expect(len(answers) == len(DOCUMENTS), answers)
    return answers


@feature("completion")
def _() -> None:
    with charged() as cost:
        evaluate("local-completions", HALF, "completions", HALF.key)
    expect(cost.tokens >= len(DOCUMENTS), cost)


@feature("chat")
def _() -> None:
    with charged() as cost:
        evaluate("local-chat-completions", HALF, "chat/completions", HALF.key)
    expect(cost.tokens >= len(DOCUMENTS), cost)


@feature("stop")
def _() -> None:
    answers = evaluate("local-completions", HALF, "completions", HALF.key)  # its chat sends the first four only
    expect(not set("".join(answers)) & set("aeiou"), answers)


@feature("seed")
def _() -> None:
    evaluate("local-completions", HALF, "completions", HALF.key, seed=7)


@feature("empty_key")
def _() -> None:
    evaluate("local-completions", CORPUS, "completions", "EMPTY")


@feature("async")
def _() -> None:
    evaluate("local-completions", HALF, "completions", HALF.key, num_concurrent=4)


run("lm-eval")
