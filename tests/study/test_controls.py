"""Controls of the gain: how their texts are chosen, that they train as `full` does, and that the share is the share."""

from dataclasses import replace

import numpy as np
import pytest

from paclm.errors import InvalidInput
from paclm.study.recorded_votes import TextVotes
from paclm.study.regimes import controls
from paclm.study.regimes.controls import ALL, FEW, HALF, NAMES, ControlsScale, choose_texts, rows_of, stand_ins
from paclm.study.text_training import train_on_texts
from study.rehearsal import build_trainable_workspace
from study.small_lab import open_lab
from study.small_lab import rows_of as run_rows

SCALE = ControlsScale(60, 2, 2, 2)
DOCUMENTS, EACH = 60, 50


@pytest.fixture(scope="module")
def template(tmp_path_factory, texts, small_base):
    return build_trainable_workspace(tmp_path_factory.mktemp("controls") / "template", texts[:40], small_base)


@pytest.fixture
def lab(template, tmp_path, texts):
    lab = open_lab(template, tmp_path / "lab")
    lab.other_text, lab.spare_text = [f"Beside {text}" for text in texts[:60]], texts[40:52]
    return lab


def test_every_text_stands_in_for_the_longest_record_left_that_it_is_as_long_as():
    texts = [[1] * 2, [2] * 9, [3] * 4, [4] * 9, [5] * 9]
    assert stand_ins([3, 5, 5], texts) == [[2] * 5, [3] * 3, [4] * 5]
    with pytest.raises(InvalidInput, match=r"1 of the 2 .* 1 more .* 10 tokens"):
        stand_ins([10, 1], texts[:1])


def test_halves_and_subsets_of_the_texts_are_of_the_right_size_and_as_disjoint_as_they_can_be(lab):
    texts, groups = choose_texts(lab, SCALE)
    members = {group.name: group.members for group in groups}
    private = len(lab.workspace.records("train"))
    assert list(members) == list(NAMES)
    assert len(texts) == 2 * private + 12
    assert [own.sum() for own in members["other text, half"].T] == [private // 2] * 2
    assert members["other text, half"].sum(axis=1).max() == 1
    assert (members["other text"].sum(), members["spare records"].sum()) == (private, 12)
    assert [own.sum() for own in members[FEW].T] == [12] * 2
    assert members[FEW].sum(axis=1).max() == 1
    lengths = [sorted(map(len, some)) for some in (texts[:private], texts[-private:])]
    assert lengths[0] == lengths[1]  # other text and private records


def test_trained_on_the_private_records_a_control_is_the_full_corpus_adapter(lab):
    from paclm.engine.base_model import base_of, context_of
    from paclm.engine.loading import AdapterStack
    from paclm.worlds.blocks import block_length, encode_texts

    lab.workspace = lab.train("full", lab.workspace)  # what is there is no adapter on all records
    full = lab.stack("full")
    settings = lab.workspace.training
    texts = encode_texts(lab.tokenizer, [record.text for record in lab.workspace.records("train")])
    everyone = np.ones((len(texts), 1), dtype=np.bool_)
    length = block_length(settings, context_of(base_of(lab.workspace)))

    def distance(seed):
        found = train_on_texts(lab, texts, everyone, settings, seed, "test", block_tokens=length).stack
        assert isinstance(found, AdapterStack)
        return max(float((found.B[layer] - full.B[layer]).abs().max()) for layer in full.B)

    seed = lab.workspace.manifest.arguments["seed"]
    assert distance(seed) < 1e-6 < distance(seed + 1)


def votes_of(chosen):
    """Votes, where each column of `chosen` (name: hits) is right or wrong; token 1 is true, 0 is not."""
    n = DOCUMENTS * EACH
    columns = {"truth": np.ones(n, int), "passage": np.repeat(np.arange(DOCUMENTS), EACH), "position": np.arange(n)}
    return TextVotes(**columns, **{name: hits.astype(int) for name, hits in chosen.items()})


def simulate(share, seed):
    """Full and worlds turn a tenth of the positions from wrong to right, the controls this share of it."""
    rng = np.random.default_rng(seed)
    n = DOCUMENTS * EACH
    start = np.repeat(rng.uniform(0.2, 0.6, DOCUMENTS), EACH)
    luck = rng.random(n)

    def after(gain):
        return luck < start + gain

    public, full = after(0.0), after(0.1)
    votes = votes_of({"public": public, "full": full, "votes": np.stack([full, after(0.1)], axis=1)})
    own = votes_of({"public": public, "votes": np.stack([after(0.1 * share)] * 4, axis=1)})
    return votes, own


FACTS = {"group": np.arange(4), "records": np.array([32, 16, 12, 12]), "tokens": np.array([90, 45, 30, 30])}


def test_the_share_is_the_share_of_the_gain_and_its_error_that_over_documents(lab):
    """100 studies: the mean share is within 4 standard errors of the truth (false alarm 6e-5), and of no other."""
    lab.ensure("full")
    found, errors = [], []
    for seed in range(100):
        rows = {row["trained_on"]: row for row in rows_of(lab, *simulate(0.6, seed), FACTS)}
        assert set(rows) == {ALL, HALF, *NAMES}
        assert rows["other text"]["of_full"] == rows["other text"]["share"] == rows["other text, half"]["share"]
        assert rows["spare records"]["share"] == pytest.approx(1.0)  # beside as many private ones, here the same votes
        assert rows["spare records"]["left_points"] == 0.0
        assert rows["other text"]["left_points"] == pytest.approx(
            rows[ALL]["gain_points"] - rows["other text"]["gain_points"]
        )
        found.append(rows["other text"]["share"])
        errors.append(rows["other text"]["share_stderr"])
    error = np.std(found, ddof=1) / 10.0
    assert abs(np.mean(found) - 0.6) < 4.0 * error < 0.1
    assert abs(np.mean(found) - 0.75) > 4.0 * error
    assert 0.8 < np.sqrt(np.mean(np.square(errors))) / np.std(found, ddof=1) < 1.25  # 99.9 % of such ratios


def test_both_decoders_have_all_rows_and_a_second_run_the_same(lab):
    rows = run_rows(lab, controls.REGIME, SCALE)
    assert [(row["decoder"], row["trained_on"]) for row in rows] == [
        (decoder, name) for decoder in ("greedy", "gumbel") for name in (ALL, HALF, *NAMES)
    ]
    greedy = {row["trained_on"]: row for row in rows if row["decoder"] == "greedy"}
    assert [greedy[name]["adapters"] for name in NAMES] == [1, 2, 1, 2]
    assert all(row["public_differs"] == 0.0 for row in rows)
    assert greedy["other text"]["tokens"] > greedy["other text, half"]["tokens"] > 0
    assert run_rows(lab, controls.REGIME, SCALE) == rows
    lab.spare_text = None
    assert [row["trained_on"] for row in run_rows(lab, controls.REGIME, SCALE)][2:4] == list(NAMES[:2])


def test_texts_are_in_the_key_of_kept_parts_and_no_record_may_be_among_them(lab):
    before = lab.parts("controls", []).key
    lab.other_text = [*lab.other_text[1:], "Another text."]
    assert lab.parts("controls", []).key != before
    assert lab.with_runtime(lab.runtime).parts("controls", []).key == lab.parts("controls", []).key
    for part in ("train", "heldout"):
        lab.spare_text = [next(iter(lab.workspace.records(part))).text]
        with pytest.raises(InvalidInput, match="1 of the texts"):
            controls.run(lab, SCALE)
    lab.other_text = lab.spare_text = None
    with pytest.raises(InvalidInput, match="--other-text"):
        controls.run(lab, SCALE)


def test_votes_on_other_positions_are_refused(lab):
    votes, own = simulate(0.5, 0)
    with pytest.raises(InvalidInput, match="same positions"):
        rows_of(lab, votes, replace(own, truth=1 - own.truth), FACTS)
