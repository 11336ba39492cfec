"""Write a student's folder: the adapter in PEFT's format, `student.json`, and a model card in Markdown.

All of it may be published. It follows from released tokens and public values, with one exception that the card names:
the figures on held-out records. What dissent alone was charged is left out, because it counts dissent.
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
from paclm.config import TrainingConfig, format_budget, in_shell
from paclm.curator.distill import DistilledText
from paclm.errors import InvalidInput
from paclm.privacy.bounds import format_bound
from paclm.privacy.dp import format_up
from paclm.privacy.releases import rule_named
from paclm.worlds.fingerprints import Base
from paclm.worlds.manifest import Manifest
from paclm.worlds.storage import hash_file, write_private
from paclm.worlds.student_folder import ADAPTER_FILES, FORMAT, MARK, STUDENT_FILE

if TYPE_CHECKING:  # torch is loaded with the models, not on import
    from paclm.engine.adapters import AdapterStack
    from paclm.engine.student_training import HeldOut, Recipe

CARD_FILE = "README.md"
_DIGITS = 3
"""Of figures on held-out records."""

_CARD = """\
---
library_name: peft
{front}tags: [lora, paclm]
---
# Student of {tokens:,} privately released tokens

A LoRA adapter of rank {rank} for {base}, made by `paclm distill` {version}. It was trained on {tokens:,} tokens of text
that a language model adapted to private records released privately, and on nothing else: not on the records, and not on
anything computed from them that was not released.

## What is promised

{promise}

Whatever is done with this adapter is post-processing of released tokens: copying, publishing, querying and training on
it change nothing about this.

## What is not promised

{limits}

## How it was made

| | |
|---|---|
| release | `{release}` |
| tokens | {tokens:,}, at τ = {temperature:g}, beginning at {beginnings} |
| charge | {charge} |
| recipe | `{kind}`, epochs: {epochs}, learning rate {learning_rate:g} |
| base model | {base}, fingerprint `{fingerprint}` |
| `{weights}` | SHA-256 `{hash}` |

{heldout}## How to use it

    paclm serve FOLDER

or with PEFT, and the tokenizer of the base model:

    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), FOLDER)
    tokenizer = AutoTokenizer.from_pretrained(BASE)

BASE is {where}.
"""
_OWN_BASES = ("tiny", "smollm2")
"""Names that mean something to paclm alone."""

_HALF = """\
The private records were assigned to {worlds} worlds, each to half of them, and one world, the realized one, was drawn
in secret. At the committed total of {committed} nats, no attack on whether {unit} in the secretly drawn half succeeds
more than {mia} of the time (a guess: 1/2), and none names the realized world more than {world_id} of the time (a guess:
1/{worlds}). The total is shared with everything else that was, or will be, served from the same secret: the bound
covers all of it together, for an adversary who knows all records, all worlds, and nothing about the realized one. If
the total is raised later, the bound on all of it together is the one at that total.{imported}"""
_IMPORTED = """ The worlds were trained elsewhere: that each was trained on its own records alone, and all of them
alike, is the operator's word."""
_NOT_HALF = """\
- Whether a record is in the corpus at all: nothing is promised about that. Everything computed from all worlds alike is
  free under this promise{free}.
- Content: facts, names and sentences of the records may occur in what this adapter writes. A bound on inference is no
  bound on emission.
- Anything against someone who knows of a few records whether they are in the drawn half: that singles out a few
  worlds, and the bound is void.
- What the public model knew before."""
_CORPUS = """\
(ε, δ)-differential privacy with ε = {epsilon} and δ = {delta} for the presence of one unit: {unit_name}. No attack on
whether {unit} in the corpus succeeds more than {mia} of the time (a guess: 1/2). The figures are those of all DP
trainings over these records that were known when this student was made; a later one adds to them."""
_NOT_CORPUS = """\
- Records that were held out: nothing here is trained on them, and nothing about them is published.
- What many units have in common: the model is there to learn it.
- Content that stands in several units.
- Anything once tokens were served under the promise `half` from the same records.
- What the public model knew before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentFacts:
    """What is published about a student beside its adapter."""

    base: Base
    text: DistilledText
    beginnings: str
    """Where the texts began, in words."""
    training: TrainingConfig
    recipe: Recipe
    manifest: Manifest
    heldout: HeldOut | None
    num_heldout: int

    @property
    def learning_rate(self) -> float:
        """The one in force."""
        return self.recipe.learning_rate or self.training.learning_rate

    @property
    def published_heldout(self) -> HeldOut | None:
        """None under `corpus`: how many records were held out would say whether one of them is in the corpus."""
        return self.heldout if self.text.settings.promise == "half" else None


def check_new(folder: Path, workspace: Path) -> None:
    """Refuse a folder with something in it, or inside the private workspace, before anything is spent."""
    if folder.resolve().is_relative_to(workspace.resolve()):
        raise InvalidInput(f"{folder} is inside the workspace, which is private. Name a folder outside with --out.")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InvalidInput(f"{folder} is not a folder. Name one that does not exist yet with --out.")
    if folder.exists() and any(folder.iterdir()):
        raise InvalidInput(f"{folder} is not empty. Name a folder that does not exist yet with --out.")
    if not (parent := folder.absolute().parent).is_dir():
        raise InvalidInput(f"{parent} does not exist. Make it first: mkdir -p {in_shell(parent)}")


def write_student(folder: Path, student: AdapterStack, facts: StudentFacts) -> None:
    """Write the folder, complete or not at all."""
    from paclm.engine.loading import has_conv1d
    from paclm.engine.peft_io import write_peft

    part = folder.absolute().with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    part.mkdir()
    try:
        write_peft(student, 0, part, _public_name(facts.base), has_conv1d(facts.base), mode=0o644, mark=MARK)
        hashes = {name: hash_file(part / name) for name in ADAPTER_FILES}
        about = json.dumps(describe_student(facts, hashes), indent=2, ensure_ascii=False) + "\n"
        write_private(part / STUDENT_FILE, about.encode(), 0o644)
        write_private(part / CARD_FILE, render_student_card(facts, hashes).encode(), 0o644)
        if folder.exists():
            folder.rmdir()  # empty, as `check_new` found
        os.replace(part, folder.absolute())
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def describe_student(facts: StudentFacts, hashes: Mapping[str, str]) -> dict[str, Any]:
    """The content of student.json."""
    text, settings, figures = facts.text, facts.text.settings, facts.text.figures
    return {
        "format": FORMAT,
        "version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "base": {"name": _public_name(facts.base), "fingerprint": facts.base.fingerprint},
        "promise": settings.promise,
        "release": settings.release,
        "tokens": text.num_tokens,
        "nats": text.most_nats,
        "committed_nats": text.committed_nats,
        **{name: figures.get(name) for name in ("mia_bound", "world_id_bound", "epsilon", "delta")},
        "unit": facts.manifest.unit,
        "unit_name": facts.manifest.unit_name,
        "worlds": facts.manifest.arguments["worlds"] if settings.promise == "half" else None,
        "voting": {
            "decoder": "gumbel" if settings.temperature else "greedy",
            "temperature": settings.temperature or 1.0,
            "support_size": settings.support_size,
        },
        "beginnings": facts.beginnings,
        "recipe": dataclasses.asdict(facts.recipe) | {"learning_rate": facts.learning_rate},
        "rank": facts.training.rank,
        "heldout": None
        if facts.published_heldout is None
        else {
            "records": facts.num_heldout,
            **{name: _rounded(value) for name, value in facts.published_heldout._asdict().items()},
        },
        "files": dict(hashes),
    }


def render_student_card(facts: StudentFacts, hashes: Mapping[str, str]) -> str:
    """The text of README.md."""
    text, settings, recipe = facts.text, facts.text.settings, facts.recipe
    is_half = settings.promise == "half"
    base = _public_name(facts.base)
    is_own = base in _OWN_BASES
    return _CARD.format(
        base=base,
        front="" if is_own else f"base_model: {base}\n",
        where=f"the folder that `paclm models list` prints for `{base}`"
        if is_own
        else f"`{base}`, or a folder with it",
        rank=facts.training.rank,
        version=__version__,
        tokens=text.num_tokens,
        promise=_promise(facts),
        limits=_limits_of_half(settings.release) if is_half else _NOT_CORPUS,
        release=settings.release,
        temperature=settings.temperature,
        beginnings=facts.beginnings,
        charge=f"at most {format_budget(text.most_nats)} nats" if is_half else "nothing is charged under `corpus`",
        kind=recipe.kind,
        epochs=recipe.epochs,
        learning_rate=facts.learning_rate,
        fingerprint=facts.base.fingerprint,
        weights=ADAPTER_FILES[1],
        hash=hashes[ADAPTER_FILES[1]],
        heldout=_heldout(facts),
    )


def _promise(facts: StudentFacts) -> str:
    figures, manifest = facts.text.figures, facts.manifest
    bounds = {"unit": manifest.unit, "mia": format_bound(figures["mia_bound"])}
    if facts.text.committed_nats is None:
        epsilon, delta = format_up(figures["epsilon"]), format_up(figures["delta"])
        return _CORPUS.format(**bounds, epsilon=epsilon, delta=delta, unit_name=manifest.unit_name)
    return _HALF.format(
        **bounds,
        committed=format_budget(facts.text.committed_nats),
        world_id=format_bound(figures["world_id_bound"]),
        worlds=manifest.arguments["worlds"],
        imported=_IMPORTED if manifest.imported else "",
    )


def _limits_of_half(release: str) -> str:
    is_free = not rule_named(release).reads_secret
    return _NOT_HALF.format(free=f", and `{release}` does not read the secret" if is_free else "")


def _heldout(facts: StudentFacts) -> str:
    if (one := facts.published_heldout) is None:
        return ""
    rows = (
        ("loss, nats per token", one.loss_public, one.loss_student),
        ("most likely token is the true one", one.accuracy_public, one.accuracy_student),
    )
    table = "\n".join(f"| {name} | {_rounded(public)} | {_rounded(own)} |" for name, public, own in rows)
    return (
        f"On {facts.num_heldout:,} held-out records ({one.tokens:,} tokens), which neither a world nor the student was "
        f"trained on:\n\n| | public model | student |\n|---|---|---|\n{table}\n\nThese figures are about the held-out "
        "records as a whole, and no promise covers them.\n\n"
    )


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def _public_name(base: Base) -> str:
    """Without the path of a folder on this machine."""
    path = Path(base.name)
    is_here = base.folder.parts[-len(path.parts) :] == path.parts or ".." in path.parts or base.name.startswith("~")
    return path.name if path.is_absolute() or is_here or path.suffix.lower() == ".gguf" else base.name
