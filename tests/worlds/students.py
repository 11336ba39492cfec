"""Small students: written as `paclm distill` writes them, with a random adapter in place of a trained one."""

import json
from dataclasses import replace

import torch

from paclm.config import TrainingConfig
from paclm.curator.distill import TextSettings
from paclm.curator.student_card import StudentFacts, write_student
from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.base_model import load_model
from paclm.engine.student import Recipe
from paclm.privacy.bounds import success_bound
from paclm.worlds.fingerprints import Base, fingerprint_base
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
    return StudentFacts(
        base=base,
        text=TextSettings(
            promise=promise,
            release="gaussian" if is_half else "dp",
            temperature=1.0,
            support_size=40,
            length=16,
            prompts=((1,),),
        ),
        training=TrainingConfig(rank=2),
        recipe=Recipe(),
        prompts="the start token",
        tokens=1000,
        most_nats=1000 * 2.0**-16 if is_half else 0.0,
        figures=HALF if is_half else CORPUS,
        committed_nats=TOTAL if is_half else None,
        num_worlds=WORLDS,
        unit="a record was",
        unit_name="record",
        heldout=None,
        num_heldout=0,
    )


def edit_json(path, **changes):
    """Write other entries into a file of JSON."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
