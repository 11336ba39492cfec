"""Write a student's folder: the adapter in PEFT's format, `student.json`, and a model card in Markdown.

All of it may be published. Nothing here follows from the members' records except through released tokens, with one
exception that the card names: the figures on held-out records. How many tokens were disputed is left out, too: it is
charged for nowhere.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paclm import __version__
from paclm.config import TrainingConfig, format_budget
from paclm.curator.distill import TextSettings
from paclm.errors import InvalidInput
from paclm.privacy.bounds import format_bound
from paclm.privacy.dp import format_up
from paclm.worlds.fingerprints import Base
from paclm.worlds.storage import hash_file, write_private
from paclm.worlds.student_folder import ADAPTER_FILES, FORMAT, MARK, STUDENT_FILE

if TYPE_CHECKING:  # torch is loaded with the models, not on import
    from paclm.engine.adapters import AdapterStack
    from paclm.engine.student import HeldOut, Recipe

CARD_FILE = "README.md"
_DIGITS = 3
"""Of figures on held-out records."""

_CARD = """\
---
library_name: peft
base_model: {base}
tags: [lora, paclm]
---
# Student

A LoRA adapter of rank {rank} for {base}, made by `paclm distill` {version}. It was trained on {tokens:,} tokens of text
that a language model adapted to private records released privately, and on nothing else: not on the records, and not on
anything that was computed from them and not released.

## What is promised

{promise}

Whatever is done with this adapter is post-processing of released tokens: copying, training on, publishing and querying
it change nothing about this.

## What is not promised

{not_promised}

## How it was made

| | |
|---|---|
| release | `{release}` |
| tokens | {tokens:,}, at τ = {temperature:g}, from {prompts} |
{charged}| recipe | {recipe} |
| base model | {base}, fingerprint `{fingerprint}` |
| `{weights}` | SHA-256 `{hash}` |

{heldout}
## How to use it

    paclm serve FOLDER

or with PEFT: `PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), FOLDER)`.
"""

_HALF = """\
At the committed total of {committed} nats, no attack on whether {unit} in the secretly drawn half succeeds more than
{mia} of the time (a guess: 1/2), and none names the realized world more than {world_id} of the time (a guess:
1/{worlds}). The total is shared with everything else that was, or will be, served from the same secret: the bound
covers all of it together."""
_NOT_HALF = """\
- Nothing about whether a record is among the private records at all: half of them were drawn in secret, and the bound
  is about which half.
- Nothing about content: facts, names and sentences of the records may occur in what this adapter writes."""
_CORPUS = """\
(ε, δ)-differential privacy with ε = {epsilon} and δ = {delta} for the presence of one unit: {unit_name}. No attack on
whether {unit} in the corpus succeeds more than {mia} of the time (a guess: 1/2)."""
_NOT_CORPUS = """\
- Nothing about facts that many units share: those are what it was trained for.
- Nothing about content that stands in several units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentFacts:
    """What is published about a student beside its adapter."""

    base: Base
    text: TextSettings
    training: TrainingConfig
    recipe: Recipe
    prompts: str
    """Where the streams began, in words."""
    tokens: int
    most_nats: float
    """What the tokens cost if every one was charged."""
    figures: Mapping[str, Any]
    """The bounds: of the ledger, or of the DP adapter."""
    committed_nats: float | None
    num_worlds: int
    unit: str
    """As in sentences: `a record was`."""
    unit_name: str
    heldout: HeldOut | None
    num_heldout: int


def check_new(folder: Path) -> None:
    """Refuse a folder with something in it, before anything is spent."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InvalidInput(f"{folder} is not a folder. Name one that does not exist yet with --out.")
    if folder.exists() and any(folder.iterdir()):
        raise InvalidInput(f"{folder} is not empty. Name a folder that does not exist yet with --out.")
    if not folder.absolute().parent.is_dir():
        raise InvalidInput(f"{folder.absolute().parent} does not exist. Make it first: mkdir -p")


def write_student(folder: Path, student: AdapterStack, facts: StudentFacts) -> None:
    """Write the folder, complete or not at all."""
    from paclm.engine.loading import has_conv1d
    from paclm.engine.peft_io import write_peft

    part = folder.absolute().with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        write_peft(student, 0, part, _public_name(facts.base), has_conv1d(facts.base), mode=0o644, mark=MARK)
        hashes = {name: hash_file(part / name) for name in ADAPTER_FILES}
        about = json.dumps(_about(facts, hashes), indent=2, ensure_ascii=False) + "\n"
        write_private(part / STUDENT_FILE, about.encode(), 0o644)
        write_private(part / CARD_FILE, render_student_card(facts, hashes).encode(), 0o644)
        if folder.exists():
            folder.rmdir()  # empty, as `check_new` found
        os.replace(part, folder.absolute())
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _about(facts: StudentFacts, hashes: Mapping[str, str]) -> dict[str, Any]:
    figures, text = facts.figures, facts.text
    heldout = None if facts.heldout is None else {k: _rounded(v) for k, v in facts.heldout._asdict().items()}
    return {
        "format": FORMAT,
        "version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "base": {"name": _public_name(facts.base), "fingerprint": facts.base.fingerprint},
        "promise": text.promise,
        "release": text.release,
        "tokens": facts.tokens,
        "nats": facts.most_nats,
        "committed_nats": facts.committed_nats,
        "mia_bound": figures["mia_bound"],
        "world_id_bound": figures.get("world_id_bound"),
        "epsilon": figures.get("epsilon"),
        "delta": figures.get("delta"),
        "unit": facts.unit,
        "unit_name": facts.unit_name,
        "worlds": facts.num_worlds if text.promise == "half" else None,
        "voting": {
            "decoder": "gumbel" if text.temperature else "greedy",
            "temperature": text.temperature or 1.0,
            "support_size": text.support_size,
        },
        "prompts": facts.prompts,
        "recipe": dataclasses.asdict(facts.recipe),
        "rank": facts.training.rank,
        "heldout": heldout,
        "heldout_records": facts.num_heldout,
        "files": dict(hashes),
    }


def render_student_card(facts: StudentFacts, hashes: Mapping[str, str]) -> str:
    """The text of README.md."""
    figures, text, recipe = facts.figures, facts.text, facts.recipe
    is_half = text.promise == "half"
    charged = f"| charge | at most {format_budget(facts.most_nats)} nats |\n"
    bounds = {"mia": format_bound(figures["mia_bound"]), "unit": facts.unit}
    if is_half:
        promise = _HALF.format(
            **bounds,
            committed=format_budget(facts.committed_nats or 0.0),
            world_id=format_bound(figures["world_id_bound"]),
            worlds=facts.num_worlds,
        )
    else:
        epsilon, delta = format_up(figures["epsilon"]), format_up(figures["delta"])
        promise = _CORPUS.format(**bounds, epsilon=epsilon, delta=delta, unit_name=facts.unit_name)
    return _CARD.format(
        base=_public_name(facts.base),
        rank=facts.training.rank,
        version=__version__,
        tokens=facts.tokens,
        promise=promise,
        not_promised=_NOT_HALF if is_half else _NOT_CORPUS,
        release=text.release,
        temperature=text.temperature,
        prompts=facts.prompts,
        charged=charged if is_half else "",
        recipe=f"`{recipe.kind}`, {recipe.epochs} epochs, learning rate {recipe.learning_rate:g}",
        fingerprint=facts.base.fingerprint,
        weights=ADAPTER_FILES[1],
        hash=hashes[ADAPTER_FILES[1]],
        heldout=_heldout(facts),
    )


def _heldout(facts: StudentFacts) -> str:
    if facts.heldout is None:
        return ""
    one = facts.heldout
    rows = (
        ("loss, nats per token", one.loss_public, one.loss_student),
        ("most likely token is the true one", one.accuracy_public, one.accuracy_student),
    )
    table = "\n".join(f"| {name} | {_rounded(public)} | {_rounded(own)} |" for name, public, own in rows)
    return (
        f"On {facts.num_heldout:,} held-out records ({one.tokens:,} tokens), which neither a world nor the student was "
        f"trained on:\n\n| | public model | student |\n|---|---|---|\n{table}\n\nThese figures are about the held-out "
        "records as a whole. They are not covered by the bound, and are rounded.\n"
    )


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def _public_name(base: Base) -> str:
    """Without the path of a folder on this machine."""
    path = Path(base.name)
    return path.name if path.is_absolute() or len(path.parts) > 2 or path.exists() else base.name
