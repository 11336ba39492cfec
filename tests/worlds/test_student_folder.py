"""A student on disk: what PEFT, Transformers and paclm read of it, and what is refused."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from paclm.config import RuntimeConfig
from paclm.curator.student_decoder import StudentDecoder, check_claims
from paclm.engine.adapters import AdapterStack
from paclm.engine.base_model import base_of_student, config_of, resolve_base
from paclm.engine.loading import open_on_base
from paclm.engine.peft_io import export_peft, import_peft
from paclm.errors import ModelError, StudentGiven, WorkspaceError
from paclm.worlds.fingerprints import Base, fingerprint_base
from paclm.worlds.storage import hash_file
from paclm.worlds.student_folder import ADAPTER_FILES, STUDENT_FILE, has_mark, is_student, read_student, refuse_student
from worlds.students import CORPUS, HALF, TOTAL, WORLDS, edit_json, make_student, random_adapter

TOKENS = [5, 40, 3, 77, 12, 60, 9]


@pytest.fixture(scope="module")
def made(tmp_path_factory, small_base):
    return make_student(tmp_path_factory.mktemp("made") / "student", small_base).path


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "student")


# --- who loads it ------------------------------------------------------------------------------------------------


def logits_here(folder, base):
    stack = import_peft([folder], base.fingerprint).as_public()
    engine = open_on_base(base, stack, 10, RuntimeConfig(device="cpu", context=16))
    return torch.cat([engine.whole_logits(hidden) for _, hidden in engine.hidden_states(TOKENS)], 1)[-1]  # (T, V)


@pytest.mark.parametrize("top", [None, 1])
def test_peft_and_transformers_load_it_with_the_logits_that_paclm_serves(tmp_path, small_base, top):
    folder = make_student(tmp_path / "student", small_base, top=top).path
    served = logits_here(folder, Base("small", small_base, fingerprint_base(small_base)))
    public = AutoModelForCausalLM.from_pretrained(small_base).eval()
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        plain = public(input_ids=ids).logits[0]
        by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_base), folder).eval()
        of_peft = by_peft(input_ids=ids).logits[0]
        public.load_adapter(str(folder))
        of_transformers = public(input_ids=ids).logits[0]
    assert float((served - of_peft).abs().max()) < 1e-4
    assert torch.equal(of_transformers, of_peft)
    assert float((served - plain).abs().max()) > 0.1, "the adapter does something"


def test_an_answer_is_that_of_transformers(folder, small_base):
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_base), folder).eval()
    expected = list(TOKENS)
    with torch.no_grad():
        for _ in range(8):
            expected.append(int(model(input_ids=torch.tensor([expected])).logits[0, -1].argmax()))
    with StudentDecoder.open(folder, str(small_base), runtime=RuntimeConfig(device="cpu")) as decoder:
        said = decoder.generate(TOKENS, 8, greedy=True, num_logprobs=1)
    assert list(said.tokens) == expected[len(TOKENS) :][: len(said.tokens)]
    assert len(said.logprobs) == len(said.tokens)
    assert said.figures["mia_bound"] == HALF["mia_bound"]


# --- what it says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("promise", ["half", "corpus"])
def test_what_was_written_is_read(tmp_path, small_base, promise):
    student = make_student(tmp_path / "student", small_base, promise)
    bounds = {"world_id_bound": None, "epsilon": None, "delta": None, **(HALF if promise == "half" else CORPUS)}
    assert {name: getattr(student, name) for name in bounds} == bounds
    assert (student.committed_nats, student.worlds) == ((TOTAL, WORLDS) if promise == "half" else (None, None))
    assert (student.promise, student.unit, student.unit_name) == (promise, "a record was", "record")
    student.verify()
    check_claims(student)


@pytest.mark.parametrize(
    "changes",
    [
        {"mia_bound": 0.2},
        {"mia_bound": float("nan")},
        {"mia_bound": "0.6"},
        {"mia_bound": True},
        {"committed_nats": None},
        {"world_id_bound": None},
        {"worlds": None},
        {"worlds": 0},
        {"promise": "none"},
        {"promise": "corpus"},
        {"tokens": 0},
        {"unit": 3},
        {"unit_name": None},
        {"release": None},
        {"base": "tiny"},
        {"base": {"name": "tiny"}},
        {"files": {}},
        {"files": {ADAPTER_FILES[0]: "0"}},
        {"created": "yesterday"},
        {"voting": {"decoder": "gumbel", "temperature": 1.0}},
        {"voting": {"decoder": "beam", "temperature": 1.0, "support_size": 40}},
        {"voting": {"decoder": "gumbel", "temperature": 1.0, "support_size": 4.5}},
        {"format": "paclm-student-2"},
    ],
    ids=str,
)
def test_a_damaged_description_is_refused(folder, changes):
    edit_json(folder / STUDENT_FILE, **changes)
    with pytest.raises(WorkspaceError):
        read_student(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"format": "paclm-student-1"}'])
def test_a_description_that_is_none_is_refused_and_the_folder_is_a_student_still(folder, content):
    (folder / STUDENT_FILE).write_bytes(content)
    with pytest.raises(WorkspaceError):
        read_student(folder)
    with pytest.raises(StudentGiven):
        refuse_student(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"mia_bound": HALF["mia_bound"] - 1e-6},
        {"world_id_bound": HALF["world_id_bound"] - 1e-6},
        {"committed_nats": TOTAL * 1.01},
        {"nats": TOTAL * 1.01},
        {"worlds": WORLDS // 2},
    ],
    ids=str,
)
def test_bounds_that_do_not_follow_from_the_committed_total_are_refused(folder, small_base, changes):
    edit_json(folder / STUDENT_FILE, **changes)
    with pytest.raises(WorkspaceError):
        StudentDecoder.open(folder, str(small_base))


# --- its files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADAPTER_FILES)
def test_adapter_files_that_changed_or_are_missing_are_refused_before_they_are_loaded(
    folder, small_base, name, monkeypatch
):
    monkeypatch.setattr("paclm.engine.peft_io.import_peft", lambda *_: pytest.fail("loaded"))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(WorkspaceError):
        StudentDecoder.open(folder, str(small_base))
    (folder / name).unlink()
    with pytest.raises(WorkspaceError):
        StudentDecoder.open(folder, str(small_base))


def test_a_private_adapter_with_the_description_of_a_student_is_refused(folder, small_base, tmp_path):
    """Also where somebody has put its hashes into the description."""
    base = Base("small", small_base, fingerprint_base(small_base))
    (world,) = export_peft(random_adapter(base), tmp_path / "worlds", "small", conv1d=True)
    assert not is_student(world)
    shutil.copy(folder / STUDENT_FILE, world)
    with pytest.raises(WorkspaceError):
        StudentDecoder.open(world, str(small_base))
    edit_json(world / STUDENT_FILE, files={name: hash_file(world / name) for name in ADAPTER_FILES})
    with pytest.raises(WorkspaceError):
        StudentDecoder.open(world, str(small_base))


def test_the_mark_is_in_the_weights_and_survives_without_the_description(folder, tmp_path, small_base):
    (folder / STUDENT_FILE).unlink()
    assert has_mark(folder)
    with safe_open(folder / ADAPTER_FILES[1], framework="pt") as weights:
        assert weights.metadata() == {"format": "pt", "paclm": "student"}
    base = Base("small", small_base, fingerprint_base(small_base))
    (world,) = export_peft(random_adapter(base), tmp_path / "worlds", "small", conv1d=True)
    assert not has_mark(world)


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 8, (9).to_bytes(8, "little") + b"[[[[[[[[[", b"\0" * 16])
def test_what_is_no_file_of_weights_has_no_mark(folder, content):
    (folder / ADAPTER_FILES[1]).write_bytes(content)
    assert not has_mark(folder)


# --- its base model ----------------------------------------------------------------------------------------------


def test_the_base_model_is_found_by_name_or_named_and_another_is_refused(tmp_path, small_base, monkeypatch):
    tiny = resolve_base("tiny")
    student = make_student(tmp_path / "student", tiny.folder, name="tiny")
    assert base_of_student(student) == tiny
    with pytest.raises(ModelError):
        base_of_student(student, str(small_base))
    stripped = make_student(tmp_path / "other", small_base)
    assert stripped.base["name"] == small_base.name, "no path of the machine that made it"
    assert base_of_student(stripped, str(small_base)).folder == small_base
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny.folder, tmp_path / small_base.name)  # another model that goes by the name
    with pytest.raises(ModelError):
        base_of_student(stripped)


@pytest.mark.parametrize("name", ["/tmp/base", "~/base", "../base", "inside/the/folder", "./base"])
def test_a_published_path_to_a_base_model_is_not_followed(folder, name, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    edit_json(copy / STUDENT_FILE, base={**read_student(folder).base, "name": name})
    with pytest.raises(ModelError, match="--base"):
        base_of_student(read_student(copy))


def test_code_of_a_base_model_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    base = shutil.copytree(resolve_base("tiny").folder, tmp_path / "base")
    (base / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass OwnConfig: pass\n")
    edit_json(base / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    with pytest.raises(ModelError):
        config_of(resolve_base(str(base)))
    assert not (tmp_path / "ran").exists()


def test_a_base_model_whose_weights_changed_is_refused(folder, small_base, tmp_path):
    changed = shutil.copytree(small_base, tmp_path / "base")
    weights = next(changed.glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ModelError):
        StudentDecoder.open(folder, str(changed))


def test_keys_of_a_student_are_not_kept_in_its_folder_and_go_with_its_adapter(folder, tmp_path, small_base):
    student = read_student(folder)
    assert not student.state_path.is_relative_to(folder)
    assert read_student(shutil.copytree(folder, tmp_path / "copy")).state_path == student.state_path
    assert make_student(tmp_path / "other", small_base, seed=4).state_path != student.state_path


def test_a_loaded_stack_is_the_one_that_was_written(folder, small_base):
    base = Base("small", small_base, fingerprint_base(small_base))
    written, read = random_adapter(base), import_peft([folder], base.fingerprint)
    assert isinstance(read, AdapterStack)
    assert all(torch.equal(read.B[layer], written.B[layer]) for layer in written.layers)
    assert json.loads((folder / ADAPTER_FILES[0]).read_text())["base_model_name_or_path"] == small_base.name
