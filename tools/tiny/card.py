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
from statistics import mean
from string import Template
from typing import Any

from paclm.worlds.clinic import PRIVATE_SEED

from .check import NUM_NOTES, NUM_PASSAGES, PASSAGE_CHARS, SEEN, UNSEEN, note_sets, probe_notes
from .evaluate import Reader, measure
from .notes import Hospitals
from .samples import NUM_NEW_TOKENS

MODELS = {
    "tiny": "**tiny**",
    "ngram": "5-gram, modified Kneser–Ney, books and articles",
    "smollm2": "SmolLM2-135M-Instruct, Q4_1",
}
"""Each measured by a command that wrote MODEL.json into the folder of the run."""
TEXTS = {
    "books": ("passages", "public-books"),
    "articles": ("passages", "public-simplewiki"),
    "both": ("passages", "all"),
    "all held-out books": ("held_out", "public-books"),
    "all held-out articles": ("held_out", "public-simplewiki"),
    "notes of held-out hospitals": ("held_out", "notes"),
}

Facts = dict[str, Any]
_NOTE_FIGURES = (("bits_per_byte", ".3f"), ("next_token_accuracy", ".1%"))


def gather(run_folder: Path, model_folder: Path, docs: Path) -> Facts:
    """The facts of a training run and of what was measured after it; SmolLM2's are kept if not measured again."""
    report = _read(run_folder / "report.json")
    figures: Facts = {"smollm2": read_facts(docs)["figures"]["smollm2"]}
    for model in MODELS:
        if model in figures and not (run_folder / f"{model}.json").is_file():
            continue
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
        "probe_notes": measure(reader.score, {str(PRIVATE_SEED): probe_notes()}),
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
    text, notes, hospitals = report["sources"]["text"], report["sources"]["notes"], plan["hospitals"]
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
        "text_tokens": f"{text['tokens'] / 1e6:.1f} million",
        "text_bytes": f"{text['bytes'] / 1e6:.1f} MB",
        "text_epochs": f"{text['epochs']:.1f}",
        "num_hospitals": f"{hospitals['count']:,}",
        "notes_each": hospitals["notes_each"],
        "num_notes_all": f"{hospitals['count'] * hospitals['notes_each']:,}",
        "num_held_out_hospitals": Hospitals(**hospitals).num_held_out,
        "note_tokens": f"{notes['tokens'] / 1e6:.1f} million",
        "note_bytes": f"{notes['bytes'] / 1e6:.1f} MB",
        "note_epochs": f"{notes['epochs']:.1f}",
        "notes_share": f"{plan['notes_share']:.0%}",
        "tokens_seen": f"{report['tokens_seen'] / 1e9:.2f} billion",
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
        "passage_table": _table(facts, ("books", "articles", "both")),
        "held_out_table": _table(
            facts, ("all held-out books", "all held-out articles", "notes of held-out hospitals"), with_accuracy=True
        ),
        "hospital_table": _hospital_table(facts["figures"]["tiny"]["notes"]),
        "sample_tokens": NUM_NEW_TOKENS,
        "options": f"--hospitals {hospitals['count']} --notes-each {hospitals['notes_each']}",
        "samples": "\n\n".join(_sample(sample) for sample in facts["samples"]),
    }
    ours = facts["figures"]["tiny"]
    words |= {
        "passages_figure": _figure(ours, "passages", "all"),
        "notes_figure": _figure(ours, "notes", str(PRIVATE_SEED)),
    }
    return Template((Path(__file__).parent / template).read_text()).substitute(words)


def _table(facts: Facts, texts: tuple[str, ...], *, with_accuracy: bool = False) -> str:
    """Bits per byte, one row for each model that was measured on one of these texts."""
    places = [TEXTS[text] for text in texts]
    ours = [facts["figures"]["tiny"][group][part] for group, part in places]
    rows = {"": list(texts), "bytes of text": [f"{figures['num_bytes']:,}" for figures in ours]}
    for model, name in MODELS.items():
        figures = facts["figures"][model]
        if any(part in figures.get(group, {}) for group, part in places):
            rows[name] = [_figure(figures, group, part) for group, part in places]
    if with_accuracy:
        rows["right token of **tiny**"] = [f"{figures['next_token_accuracy']:.1%}" for figures in ours]
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join([lines[0], "|---|" + "---:|" * len(texts), *lines[1:]])


def _hospital_table(notes: Facts) -> str:
    """The private hospital, the range over other unseen ones, and those seen in training."""
    unseen = [notes[str(seed)] for seed in UNSEEN]

    def span(name: str, style: str) -> str:
        values = [figures[name] for figures in unseen]
        return f"{mean(values):{style}} ({min(values):{style}} to {max(values):{style}})"

    rows = {
        f"{PRIVATE_SEED}, the private one": [
            f"{notes[str(PRIVATE_SEED)][name]:{style}}" for name, style in _NOTE_FIGURES
        ],
        f"{UNSEEN[0]} to {UNSEEN[-1]}, never trained on": [span(name, style) for name, style in _NOTE_FIGURES],
        f"{SEEN[0]:,} to {SEEN[-1]:,}, trained on": [f"{notes['seen'][name]:{style}}" for name, style in _NOTE_FIGURES],
    }
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(["| hospital | bits per byte | right token |", "|---|---:|---:|", *lines])


def _figure(figures: Facts, group: str, part: str) -> str:
    found = figures.get(group, {}).get(part)
    return "–" if found is None else f"{found['bits_per_byte']:.3f}"


def _sample(sample: dict[str, str]) -> str:
    prompt, text = (html.escape(sample[part], quote=False).replace("\n", "<br>") for part in ("prompt", "continuation"))
    return f"<blockquote><b>{prompt}</b>{text}</blockquote>"


def _read(path: Path) -> Any:
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: see docs/research/tiny.md for the command that writes it.")
    return json.loads(path.read_text())
