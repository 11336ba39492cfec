"""The model card of `tiny`: every figure comes from a file that a command wrote.

`docs/research/tiny.json` keeps the figures, `docs/research/tiny-curve.json` the loss curve. Pages and picture are made
from them, so they can be made again when the notes, and with them one figure, change. `tests/tools/test_card.py` checks
that weights, figures and pages agree.
"""

from __future__ import annotations

import html
import json
from hashlib import sha256
from pathlib import Path
from string import Template
from typing import Any

from .check import NOTES_SEED, NUM_NOTES, NUM_PASSAGES, PASSAGE_CHARS, note_sets
from .evaluate import Reader, measure

NUM_PROBE_NOTES = 20
"""Notes a test scores in seconds."""

MODELS = {
    "tiny": "**tiny**",
    "ngram": "5-gram, modified Kneser–Ney, same tokens",
    "smollm2": "SmolLM2-135M-Instruct, Q4_1",
}
"""Each measured by a command that wrote MODEL.json into the folder of the run."""
TEXTS = {
    "books": ("passages", "public-books"),
    "articles": ("passages", "public-simplewiki"),
    "both": ("passages", "all"),
    "all held-out books": ("held_out", "public-books"),
    "all held-out articles": ("held_out", "public-simplewiki"),
    "all held out": ("held_out", "all"),
}

Facts = dict[str, Any]


def gather(run_folder: Path, model_folder: Path) -> Facts:
    """The facts of a training run and of what was measured after it."""
    report = _read(run_folder / "report.json")
    figures: Facts = {}
    for model in MODELS:
        measured = _read(run_folder / f"{model}.json")
        figures[model] = {name: value for name, value in measured.items() if name != "seconds"}
    figures["tiny"]["held_out"] = report.pop("held_out")
    return {
        "weights_sha256": hash_weights(model_folder),
        "report": report,
        "figures": figures,
        "samples": _read(run_folder / "samples.json"),
        "curve": _read(run_folder / "curve.json"),
    }


def read_facts(docs: Path) -> Facts:
    facts: Facts = _read(docs / "research" / "tiny.json")
    return facts | {"curve": _read(docs / "research" / "tiny-curve.json")}


def measure_notes(facts: Facts, model_folder: Path) -> Facts:
    """The facts with the figures on synthetic notes measured again on the current weights."""
    reader = Reader.load(model_folder)
    ours = facts["figures"]["tiny"] | {
        "notes": measure(reader.score, note_sets()),
        "probe_notes": measure(reader.score, note_sets(NUM_PROBE_NOTES)),
    }
    return facts | {
        "weights_sha256": hash_weights(model_folder),
        "figures": facts["figures"] | {"tiny": ours},
    }


def hash_weights(model_folder: Path) -> str:
    return sha256((model_folder / "model.safetensors").read_bytes()).hexdigest()


def write_pages(facts: Facts, docs: Path, model_folder: Path) -> None:
    from .curve import draw_curve

    (docs / "images").mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in facts.items() if name != "curve"}
    (docs / "research" / "tiny.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    (docs / "research" / "tiny-curve.json").write_text("[\n" + ",\n".join(map(json.dumps, facts["curve"])) + "\n]\n")
    (docs / "research" / "tiny.md").write_text(render("card.md", facts))
    (model_folder / "README.md").write_text(render("readme.md", facts))
    draw_curve(facts["curve"], facts["figures"], docs / "images" / "tiny-curve.svg")


def render(template: str, facts: Facts) -> str:
    """One page of the card."""
    report, shape, plan = facts["report"], facts["report"]["shape"], facts["report"]["plan"]
    words = {
        "sha256": facts["weights_sha256"],
        "parameters": f"{report['num_parameters']:,}",
        "vocab_size": f"{shape['vocab_size']:,}",
        "layers": shape["num_layers"],
        "width": shape["width"],
        "heads": shape["num_heads"],
        "hidden": shape["hidden"],
        "context": shape["context"],
        "dropout": shape["dropout"],
        "train_tokens": f"{report['train_tokens'] / 1e6:.1f} million",
        "train_bytes": f"{report['train_bytes'] / 1e6:.1f} MB",
        "tokens_seen": f"{report['tokens_seen'] / 1e9:.2f} billion",
        "epochs": f"{report['epochs']:.1f}",
        "steps": f"{report['steps']:,}",
        "batch_tokens": f"{plan['batch'] * shape['context']:,}",
        "lr": f"{plan['lr']:g}",
        "warmup": f"{plan['warmup_share']:.0%}",
        "weight_decay": plan["weight_decay"],
        "minutes": f"{report['train_seconds'] / 60:.1f}",
        "whole_minutes": f"{plan['minutes']:g}",
        "device": report["device"],
        "torch": report["torch"],
        "passage_chars": f"{PASSAGE_CHARS:,}",
        "num_passages": NUM_PASSAGES,
        "num_notes": NUM_NOTES,
        "notes_seed": NOTES_SEED,
        "passage_table": _table(facts, ("books", "articles", "both")),
        "held_out_table": _table(facts, ("all held-out books", "all held-out articles", "all held out")),
        "samples": "\n\n".join(_sample(sample) for sample in facts["samples"]),
    }
    ours = facts["figures"]["tiny"]
    words |= {
        "passages_figure": _figure(ours, "passages", "all"),
        "notes_figure": _figure(ours, "notes", "all"),
        "accuracy": f"{ours['held_out']['all']['next_token_accuracy']:.1%}",
        "notes_accuracy": f"{ours['notes']['all']['next_token_accuracy']:.1%}",
    }
    return Template((Path(__file__).parent / template).read_text()).substitute(words)


def _table(facts: Facts, texts: tuple[str, ...]) -> str:
    """Bits per byte, one row for each model that was measured on these texts."""
    places = [TEXTS[text] for text in texts]
    sizes = [facts["figures"]["tiny"][group][part]["num_bytes"] for group, part in places]
    rows = {"": texts, "bytes of text": [f"{size:,}" for size in sizes]}
    for model, name in MODELS.items():
        figures = facts["figures"][model]
        if all(group in figures for group, _ in places):
            rows[name] = [_figure(figures, group, part) for group, part in places]
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join([lines[0], "|---|" + "---:|" * len(texts), *lines[1:]])


def _figure(figures: Facts, group: str, part: str) -> str:
    return f"{figures[group][part]['bits_per_byte']:.3f}"


def _sample(sample: dict[str, str]) -> str:
    text = html.escape(sample["continuation"], quote=False).replace("\n", "<br>")
    return f"<blockquote><b>{html.escape(sample['prompt'], quote=False)}</b>{text}</blockquote>"


def _read(path: Path) -> Any:
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: see docs/research/tiny.md for the command that writes it.")
    return json.loads(path.read_text())
