"""Small students: written as `paclm distill` writes them, with a random adapter in place of a trained one."""

import json
from dataclasses import replace

import torch

from paclm.config import TrainingConfig
from paclm.curator.distill import DistilledText, TextSettings
from paclm.curator.student_card import StudentFacts, write_student
from paclm.curator.transcript import ReleasedText
from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.base_model import load_model
from paclm.engine.student_training import Recipe
from paclm.privacy.accounting import units_up
from paclm.privacy.bounds import success_bound
from paclm.worlds.fingerprints import Base, fingerprint_base
from paclm.worlds.manifest import Manifest
from paclm.worlds.student_folder import read_student

WORLDS = 8
TOTAL = 2.0**-4
HALF = {"mia_bound": success_bound(TOTAL, 1 / 2), "world_id_bound": success_bound(TOTAL, 1 / WORLDS)}
CORPUS = {"mia_bound": 0.778, "epsilon": 8.0, "delta": 1e-5}


def make_student(folder, base_folder, promise="half", *, name=None, top=None, seed=3):
    """A student of the base model in a folder, by this name in its student.json; far from the public model."""
    base = Base(name or str(base_folder), base_folder, fingerprint_base(base_folder))
    write_student(folder, random_adapter(base, top, seed), facts_of(base, promise))
    return read_student(folder)


def random_adapter(base, top=None, seed=3):
    spec = AdapterSpec(rank=2, alpha=4.0, top=top)
    targets = find_targets(load_model(base, torch.float32), spec)
    start = AdapterStack.initial(targets, spec, 1, seed, base.fingerprint)
    generator = torch.Generator().manual_seed(seed)
    return replace(start, B={name: b.normal_(0.0, 0.6, generator=generator) for name, b in start.B.items()})


def facts_of(base, promise="half"):
    is_half = promise == "half"
    settings = TextSettings(
        promise=promise,
        release="gaussian" if is_half else "dp",
        temperature=1.0,
        support_size=40,
        length=1000,
        prompts=((1,),),
    )
    most = 1000 * units_up(2.0**-16) if is_half else 0
    text = DistilledText(
        settings=settings,
        texts=[ReleasedText((1,), 7, 1.0, [9] * 1000, most)],
        charged_nats=0.0,
        figures=HALF if is_half else CORPUS,
        committed_nats=TOTAL if is_half else None,
    )
    return StudentFacts(
        base=base,
        text=text,
        beginnings="the start token",
        training=TrainingConfig(rank=2),
        recipe=Recipe(),
        manifest=Manifest(
            format=1, id="", created="", versions={}, arguments={"worlds": WORLDS}, summary={}, files={}, base={}
        ),
        heldout=None,
        num_heldout=0,
    )


def edit_json(path, **changes):
    """Write other entries into a file of JSON."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
