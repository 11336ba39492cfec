"""Every regime at a scale of seconds, for tests that need all tables of a study."""

import gc
import re

from paclm.study.copied_records import CopiesScale
from paclm.study.questions import Question
from paclm.study.regimes import (
    NAMES,
    ablation,
    accuracy,
    attacks,
    baselines,
    canaries,
    capacity,
    census,
    choices,
    chosen_prompts,
    content,
    controls,
    cost,
    coupling,
    depth,
    dp,
    flatness,
    forgetting,
    generation,
    knowledge,
    lm_eval,
    meter,
    pmixed,
    precision,
    regime_named,
    releases,
    sessions,
    student,
    sweep,
    temperature,
    tokens_only,
    universe,
    worlds,
)
from paclm.study.run import run_regime
from study.small_lab import add_result, build_study_workspace, open_lab

SCALES = {
    "ablation": ablation.AblationScale(trials=2, length=6, prompt=8),
    "accuracy": accuracy.AccuracyScale(60, 2),
    "attacks": attacks.AttacksScale(60, 2, 4, 20, (2.0**-4, 2.0**-16)),
    "baselines": baselines.BaselinesScale(60, 2),
    "canaries": canaries.CanariesScale(trials=40, trials_outside=6, draws=2, imagined=12),
    "capacity": capacity.CapacityScale(3, 40, 2, (1, 4)),
    "census": census.CensusScale(40),
    "choices": choices.ChoicesScale(
        records=6, tokens=20, stride=6, draws=1, choices=(2,), margins=(1.0,), words=3, sequences=12
    ),
    "chosen_prompts": chosen_prompts.ChosenPromptsScale(
        records=4,
        tokens=20,
        draws=1,
        attacked=3,
        kept=4,
        repeats=16,
        token_records=2,
        token_sessions=3,
        copies=CopiesScale(worlds=4, others=4, attacked=2, copies=2, canaries=2, visits=2, record_tokens=20),
        budgets=(chosen_prompts.Budget(2.0**-4, (1, 4)), chosen_prompts.Budget(2.0**-8, (2, 8))),
    ),
    "content": content.ContentScale(60, 2, 20, (1, 2)),
    "controls": controls.ControlsScale(40, 2, 2, 1),
    "cost": cost.CostScale(60, 2, 2, (1, 2), contexts=(9,), commits=3),
    "coupling": coupling.CouplingScale(60, 2, 20),
    "depth": depth.DepthScale(
        worlds=2,
        records=24,
        positions=40,
        trial_worlds=2,
        trial_positions=40,
        most_rates=1,
        sessions=4,
        tokens=16,
        streams=2,
        timed_worlds=2,
        steps=1,
        ranks=(2,),
        context=16,
    ),
    "dp": dp.DpScale(60, 2, (2.0, 8.0), delta=1e-3),
    "flatness": flatness.FlatnessScale(60, 2),
    "forgetting": forgetting.ForgettingScale(60, 2, 4, (10, 20), (2.0**-2, 2.0**-8)),
    "generation": generation.GenerationScale(sequences=2, lengths=(4, 8), prompt=8),
    "knowledge": knowledge.KnowledgeScale(questions=4, sessions=2, budgets=(2.0**-4, 2.0**-16)),
    "lm_eval": lm_eval.LmEvalScale(),
    "meter": meter.MeterScale(records=6, tokens=20, draws=2, shadows=2, shadow_worlds=2, sequences=8),
    "pmixed": pmixed.PMixedScale(40, (2, 4), False, 60, 20, epochs_ratio=1, horizons=(10, 100), rates=(1.0, 0.3)),
    "precision": precision.PrecisionScale(40),
    "releases": releases.ReleasesScale(60, 2, 4, 20),
    "sessions": sessions.SessionScale(
        sessions=2, queries=2, tokens=8, prompt=8, budgets=(2.0**-4, 2.0**-16), horizons=(8, 16)
    ),
    "student": student.StudentScale(
        positions=60,
        gumbel_draws=2,
        tokens=(40, 90),
        releases=("gaussian", "plurality"),
        per_token=2.0**-32,
        deployments=2,
        attacked=40,
        records=24,
        record_tokens=24,
        streams=4,
        length=16,
        recipes=90,
    ),
    "sweep": sweep.SweepScale(trials=4, long_trials=2, lengths=(4, 8), budgets=(0.25, 2.0**-16), prompt=8),
    "temperature": temperature.TemperatureScale(60, 2, (1.0, 0.5, 0.0)),
    "tokens_only": tokens_only.TokensOnlyScale(60, 2, sessions=3, tokens=8, particles=4),
    "universe": universe.UniverseScale(records=4, tokens=24, prompt=8, released=4, sequences=3),
    "worlds": worlds.WorldsScale(40, 1, sizes=(2, 4, 8), subsets=2, designs=(4,)),
}
QUESTIONS = [
    Question("the patient reports", " fever", "sign"),
    Question("review in a", " week", "time"),
    Question("the old", " house"),
]


def build_trainable_workspace(path, texts, base, num_canaries=0):
    """A small workspace whose further adapters are quickly trained, and fit beside those that are there."""
    built = build_study_workspace(path, texts, base, num_canaries)
    settings = built / "paclm.toml"
    changes = {"rank = 8": "rank = 2", "alpha = 16.0": "alpha = 4.0", "learning_rate = 0.0002": "learning_rate = 0.002"}
    text = settings.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    text, changed = re.subn(r"# steps = \d+", "steps = 2", text)  # of [dp]
    assert changed == 1
    settings.write_text(text)
    return built


def rehearse(lab):
    """Run everything."""
    assert set(SCALES) == set(NAMES), "every regime needs a scale of seconds here"
    results = {}
    for name in NAMES:
        results[name] = run_regime(lab, regime_named(name), "quick", scale=SCALES[name])
        gc.freeze()  # what regimes import: engines that are freed collect garbage each time
    return results


def open_rehearsal(folder, texts, base):
    """A lab of one's own with canaries in its corpus, questions about it and a result of lm-eval."""
    template = build_trainable_workspace(folder / "template", texts[:40], base, num_canaries=8)
    lab = open_lab(template, folder / "lab", questions=QUESTIONS)
    add_result(lab, "public")
    lab.other_text, lab.spare_text = [f"Beside {text}" for text in texts[:40]], texts[40:52]
    return lab
