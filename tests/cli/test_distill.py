"""`paclm distill` as a user types it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cli.commands import figures_of, invoke
from curator.deployments import ScriptedEngine, set_mechanism, without_notes
from curator.dp_deployments import GUARANTEE, with_dp_adapter
from curator.public_training import TOUCHED
from paclm import Curator
from paclm.curator import distill as distilling
from paclm.curator.beginnings import find_beginnings
from paclm.errors import BudgetExceeded, InvalidInput, LedgerBusy, PromiseConflict, WorkspaceError
from paclm.ledger.dp_log import DpLog
from paclm.worlds.layout import dp_log_path
from paclm.worlds.student_folder import read_student
from paclm.worlds.workspace import Workspace

PRICE = 2.0**-16
TOKENS = 120
KEYS = ["tokens", "new_tokens", "charged_nats", "mia_bound", "world_id_bound"]
run = partial(invoke, "distill")
figures = partial(figures_of, "distill")


@pytest.fixture(autouse=True)
def no_notes(own_state):
    with without_notes():
        yield


def make_clinic(template, path, **mechanism):
    shutil.copytree(template, path)
    set_mechanism(path, **{"per_token": "2^-16", "total": "2^-4", "support_size": 40, **mechanism})
    return path


@pytest.fixture(scope="module")
def made(template, tmp_path_factory):
    """A student, and the arguments that it was trained with."""
    folder, seen = tmp_path_factory.mktemp("made"), {}
    clinic, train = make_clinic(template, folder / "clinic"), distilling.train

    def record(base, texts, settings, recipe, runtime, support_size, on_step):
        names = ("base", "texts", "settings", "recipe", "runtime", "support_size")
        seen.update(zip(names, (base, texts, settings, recipe, runtime, support_size), strict=True))
        return train(base, texts, settings, recipe, runtime, support_size, on_step)

    with pytest.MonkeyPatch.context() as patch, without_notes():
        patch.setattr(distilling, "train", record)
        result = figures(clinic, "--tokens", TOKENS, "--out", folder / "student", "--length", 20)
    return SimpleNamespace(clinic=clinic, student=folder / "student", figures=result, arguments=seen)


@pytest.fixture
def again(made, tmp_path):
    """The workspace of `made`, to go on with."""
    return shutil.copytree(made.clinic, tmp_path / "again")


def spent(clinic):
    return figures_of("ledger", "show", clinic)["spent_nats"]


def weights(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


# --- one student --------------------------------------------------------------------------------------------------


def test_json_has_the_text_its_price_the_bounds_and_the_folder(made):
    assert list(made.figures)[:5] == KEYS
    assert (made.figures["tokens"], made.figures["new_tokens"]) == (TOKENS, TOKENS)
    assert made.figures["charged_nats"] == TOKENS * PRICE == spent(made.clinic)
    shown = figures_of("ledger", "show", made.clinic)
    assert [made.figures[name] for name in KEYS[3:]] == [shown[name] for name in KEYS[3:]]
    assert made.figures["student"] == str(made.student)
    assert made.figures["heldout_tokens"] > 0


def test_the_folder_is_complete_public_and_says_what_it_is(made):
    assert sorted(path.name for path in made.student.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "student.json",
    ]
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in made.student.iterdir())
    student = read_student(made.student)
    student.verify()
    assert (student.tokens, student.nats, student.committed_nats) == (TOKENS, TOKENS * PRICE, 2.0**-4)
    assert (student.promise, student.release) == ("half", "gaussian")


def test_the_student_loads_in_peft_and_is_not_the_public_model(made, small_base):
    import peft
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_base), made.student).eval()
        ids = torch.tensor([[5, 6, 7, 8]])
        with torch.no_grad():
            own = model(ids).logits
            with model.disable_adapter():
                public = model(ids).logits
    assert float((own - public).abs().max()) > 1e-4


def test_distilled_tokens_have_a_tag_of_their_own(made):
    keys = figures_of("ledger", "explain", made.clinic)["keys"]
    assert [(entry["name"].partition(":")[0], entry["private_tokens"]) for entry in keys] == [("distill", TOKENS)]


# --- nothing but released and public values -----------------------------------------------------------------------


@pytest.fixture
def unreadable(made, tmp_path):
    """Run a trainer, in a process of its own, after all of the workspace was moved away."""
    values = made.arguments
    plain = {
        "base": {**asdict(values["base"]), "folder": str(values["base"].folder)},
        "texts": [asdict(text) for text in values["texts"]],
        **{name: asdict(values[name]) for name in ("settings", "recipe", "runtime")},
        "support_size": values["support_size"],
    }
    (tmp_path / "arguments.json").write_text(json.dumps(plain))
    clinic = made.clinic.rename(tmp_path / "moved away")

    def start(how):
        driver = Path(__file__).parents[1] / "curator" / "public_training.py"
        command = [sys.executable, driver, tmp_path / "arguments.json", tmp_path / how, made.clinic, how]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)

    yield start
    clinic.rename(made.clinic)


def test_training_with_everything_private_unreadable_gives_the_same_student_bit_for_bit(made, unreadable, tmp_path):
    done = unreadable("right")
    assert done.returncode == 0, done.stderr[-800:]
    assert weights(tmp_path / "right") == weights(made.student)


@pytest.mark.parametrize(("how", "status"), [("adapter", None), ("corpus", TOUCHED), ("ledger", TOUCHED)])
def test_a_training_that_reads_anything_private_is_found(unreadable, tmp_path, how, status):
    """Adapters are opened by a library that Python does not see: there it is the missing file."""
    done = unreadable(how)
    assert done.returncode == (status or 1)
    assert not (tmp_path / how).exists()


def test_the_public_models_beginnings_need_nothing_private_either(made, unreadable):
    done = unreadable("beginnings")
    assert done.returncode == 0, done.stderr[-800:]
    values = made.arguments
    found = find_beginnings(values["base"], values["runtime"], "public", values["support_size"])
    assert [tuple(tokens) for tokens in json.loads(done.stdout)] == found.tokens
    assert len(set(found.tokens)) > 200


def test_what_training_is_given_is_the_released_text(made, again, small_tokenizer):
    texts = made.arguments["texts"]
    with Curator.open(again, engine=ScriptedEngine(), tokenizer=small_tokenizer) as curator:
        beginnings = find_beginnings(made.arguments["base"], made.arguments["runtime"], "none", 40)
        settings = distilling.text_settings(curator, Workspace.open(again), beginnings, 20)
        with distilling.open_distiller(Workspace.open(again), curator, settings) as distiller:
            assert distiller.plan(TOKENS).kept == TOKENS
            assert distiller.text(TOKENS).texts == texts


def test_held_out_records_score_the_student_and_change_nothing_about_it(made, again, tmp_path, monkeypatch):
    order, train = [], distilling.train
    monkeypatch.setattr(distilling, "train", lambda *arguments: order.append("train") or train(*arguments))
    monkeypatch.setattr(distilling, "score", lambda *arguments: order.append("score"))
    found = figures(again, "--tokens", TOKENS, "--out", tmp_path / "unscored", "--length", 20)
    assert order == ["train", "score"]
    assert "heldout_tokens" not in found
    assert weights(tmp_path / "unscored") == weights(made.student)
    assert read_student(tmp_path / "unscored").tokens == TOKENS


# --- going on -----------------------------------------------------------------------------------------------------


def test_another_rank_or_more_epochs_are_charged_nothing_and_more_tokens_the_difference(made, again, tmp_path):
    for number, options in enumerate((("--rank", 3), ("--epochs", 1), ("--length", 20))):
        found = figures(again, "--tokens", TOKENS, "--length", 20, *options, "--out", tmp_path / str(number))
        assert (found["new_tokens"], found["charged_nats"]) == (0, TOKENS * PRICE)
    assert json.loads((tmp_path / "0" / "adapter_config.json").read_text())["r"] == 3
    assert weights(tmp_path / "1") != weights(tmp_path / "2") == weights(made.student)
    found = figures(again, "--tokens", TOKENS + 30, "--length", 20, "--out", tmp_path / "more")
    assert (found["tokens"], found["new_tokens"]) == (TOKENS + 30, 30)
    assert found["charged_nats"] == (TOKENS + 30) * PRICE == spent(again)


def test_a_killed_command_goes_on_when_it_is_repeated(template, tmp_path):
    clinic = make_clinic(template, tmp_path / "clinic")
    options = ("--tokens", 4000, "--out", tmp_path / "student", "--epochs", 1, "--length", 30)
    command = [sys.executable, "-m", "paclm", "distill", *map(str, (clinic, *options))]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not any(path.read_bytes().count(b"\n") > 1 for path in (clinic / "curator").glob("distill-*.sealed")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "student").exists()
    found = figures(clinic, *options)
    assert 0 < found["new_tokens"] < found["tokens"] == 4000
    assert found["charged_nats"] == 4000 * PRICE <= spent(clinic)


def test_the_plan_is_shown_before_anything_is_released(template, tmp_path, monkeypatch):
    clinic = make_clinic(template, tmp_path / "clinic")
    monkeypatch.setattr(distilling.Distiller, "generate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    done = run(clinic, "--tokens", "200", "--out", tmp_path / "student")
    for words in ("200 tokens by gaussian", "at most 0.00305", "0 of 2^-4 are spent", "about", "streams"):
        assert words in " ".join(done.stderr.split())
    assert figures_of("ledger", "show", clinic)["private_tokens"] == 0


def test_plurality_costs_nothing_also_without_any_budget_left(made, again, tmp_path):
    set_mechanism(again, per_token="2^-16", total=TOKENS * PRICE, support_size=40)
    with pytest.raises(BudgetExceeded):
        run(again, "--tokens", TOKENS + 1, "--length", 20, "--out", tmp_path / "student")
    found = figures(again, "--tokens", 50, "--out", tmp_path / "student", "--release", "plurality")
    assert (found["charged_nats"], found["new_tokens"], found["release"]) == (0.0, 50, "plurality")
    assert spent(again) == TOKENS * PRICE


@pytest.mark.parametrize("prompts", ["public", "prompts.txt"])
def test_texts_begin_where_the_prompts_say(template, tmp_path, monkeypatch, prompts):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("the patient reports\n\nblood pressure\n")
    clinic = make_clinic(template, tmp_path / "clinic", release="plurality")
    seen, train = [], distilling.train
    monkeypatch.setattr(distilling, "train", lambda base, texts, *rest: seen.extend(texts) or train(base, texts, *rest))
    run(clinic, "--tokens", 40, "--out", "student", "--prompts", prompts, "--length", 10)
    begun = {text.prompt for text in seen}
    assert len(begun) == (2 if prompts == "prompts.txt" else len(seen))
    published = "".join(path.read_text() for path in (Path("student/README.md"), Path("student/student.json")))
    assert "blood" not in published
    assert str(tmp_path) not in published


def test_two_workers_make_a_student(template, tmp_path):
    clinic = make_clinic(template, tmp_path / "clinic")
    found = figures(clinic, "--tokens", 30, "--out", tmp_path / "student", "--workers", 2)
    assert (found["tokens"], found["charged_nats"]) == (30, 30 * PRICE)


# --- refusals -----------------------------------------------------------------------------------------------------


def test_a_budget_that_does_not_cover_the_text_ends_the_command_with_status_2(template, tmp_path, paclm):
    clinic = make_clinic(template, tmp_path / "clinic")
    outcome = paclm("distill", str(clinic), "--tokens", "1M", "--out", str(tmp_path / "student"))
    assert (outcome.status, outcome.out) == (2, "")
    assert "4,096 tokens" in outcome.err  # as many as there is a budget for
    assert figures_of("ledger", "show", clinic)["private_tokens"] == 0
    assert not (tmp_path / "student").exists()


@pytest.mark.parametrize("store", ["file", "database"])
def test_beside_a_server_of_the_workspace_it_is_refused(template, tmp_path, small_tokenizer, request, store):
    clinic = make_clinic(template, tmp_path / "clinic")
    with pytest.MonkeyPatch.context() as patch:
        if store == "database":
            patch.setenv("PACLM_LEDGER", request.getfixturevalue("database"))
        with Curator.open(clinic, engine=ScriptedEngine(), tokenizer=small_tokenizer) as curator:
            with pytest.raises(LedgerBusy, match="stop the server"):
                run(clinic, "--tokens", 10, "--out", tmp_path / "student")
            assert curator.account.tokens == 0


def test_mistakes_are_refused_before_anything_is_opened(template, tmp_path, monkeypatch):
    clinic = make_clinic(template, tmp_path / "clinic")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "full")
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    new = ("--out", tmp_path / "new")
    for options in (
        ("--tokens", 10, "--out", tmp_path / "full"),
        ("--tokens", 10, "--out", tmp_path / "link"),
        ("--tokens", 10, "--out", tmp_path / "no" / "parent"),
        ("--tokens", 10, "--out", clinic / "student"),
        ("--tokens", 0, *new),
        ("--tokens", 1.5, *new),
        ("--tokens", 10, *new, "--promise", "corpus", "--release", "plurality"),
        ("--tokens", 10, *new, "--promise", "corpus", "--mix-promises"),
    ):
        with pytest.raises(InvalidInput):
            run(clinic, *options)
    with pytest.raises(WorkspaceError):
        run(clinic, "--tokens", 10, *new, "--promise", "corpus")  # no DP adapter
    assert os.listdir(clinic / "curator") == []


def test_prompts_that_cannot_be_read_are_refused(template, tmp_path):
    clinic = make_clinic(template, tmp_path / "clinic")
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("empty", "binary", "missing"):
        with pytest.raises(InvalidInput, match=name):
            run(clinic, "--tokens", 10, "--out", tmp_path / "student", "--prompts", tmp_path / name)


# --- the promise corpus -------------------------------------------------------------------------------------------


@pytest.fixture
def dp_clinic(template, tmp_path, monkeypatch):
    clinic = make_clinic(template, tmp_path / "clinic")
    with_dp_adapter(Workspace.open(clinic))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACLM_STATE_DIR", str(tmp_path / "notes"))
        yield clinic


def test_under_corpus_the_student_inherits_epsilon_and_delta(dp_clinic, tmp_path):
    options = ("--tokens", 60, "--promise", "corpus", "--out")
    found = figures(dp_clinic, *options, tmp_path / "student")
    assert list(found)[:8] == [*KEYS, "epsilon", "delta", "unit"]
    assert (found["epsilon"], found["delta"], found["unit"]) == (GUARANTEE.epsilon, GUARANTEE.delta, "record")
    assert (found["charged_nats"], found["world_id_bound"]) == (0.0, None)
    student = read_student(tmp_path / "student")
    assert (student.promise, student.epsilon, student.committed_nats) == ("corpus", GUARANTEE.epsilon, None)
    assert figures(dp_clinic, *options, tmp_path / "again")["new_tokens"] == 0
    assert not (dp_clinic / "curator" / "ledger.sqlite").exists()


def test_where_promises_were_mixed_nothing_is_generated(dp_clinic, tmp_path):
    log = DpLog(dp_log_path(dp_clinic))
    log.append("mixed")
    with pytest.raises(PromiseConflict):
        run(dp_clinic, "--tokens", 60, "--promise", "corpus", "--out", tmp_path / "student")
    assert not log.has("served")
    assert not list((dp_clinic / "curator").glob("distill-*"))
