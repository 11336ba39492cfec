"""A mask is a function of the grammar and of the tokens released so far: of nothing else that the curator holds.

The argument that masks cost nothing rests on this, as it does for coins. Each mask that an engine is given is computed
again from these two alone; the same check finds every mask below that depends on something else.
"""

import numpy as np
import pytest
import torch

from paclm import Curator
from paclm.curator import grammar
from paclm.curator.grammar import Grammar, Grammars, GrammarState
from paclm.curator.redacted import Redacted
from paclm.engine.adapters import AdapterStack
from paclm.errors import InvalidInput
from paclm.worlds.layout import WORLDS_FILE
from structured.answers import GRAMMARS
from structured.checks import check_charges, check_masks, masks_of
from structured.recorder import allowed_ids
from structured.runs import MIXED, NUM_PAID, PER_TOKEN, WORLDS, SeededNoise, set_secret

ROW = {**MIXED, "support": 40}
KINDS = ["json", "regex", "lark", "json"]


def check_all(lab, run):
    for number in range(len(run.streams)):
        check_masks(lab, run, number)


def believing(world):
    """As if the released tokens had named this world for all but certain."""
    belief = np.full(WORLDS, -20.0)
    belief[world] = 0.0
    belief -= np.log(np.exp(belief).sum())

    def change(curator):
        curator._custody.belief = Redacted(belief)

    return change


def with_noise(seed):
    def change(curator):
        curator._releaser._noise = SeededNoise(seed)

    return change


def other_adapters(lab):
    """Of the same shape, from another draw."""
    stack = AdapterStack.load(lab.workspace(ROW).adapters_path / WORLDS_FILE)
    draw = torch.Generator().manual_seed(17)
    return stack.map(lambda tensor: torch.empty_like(tensor).normal_(0.0, 0.4, generator=draw))


VARIATIONS = {
    "as it is": {},
    **{f"secret {world}": {"change": lambda curator, world=world: set_secret(curator, world)} for world in (2, 5)},
    **{f"belief in world {world}": {"change": believing(world)} for world in (0, 3)},
    **{f"noise {seed}": {"change": with_noise(seed)} for seed in (71, 72)},
    "a budget that ends": {"budget": "public"},
    "charges for dissent only": {"charge": "dissent"},
    **{f"release {name}": {"release": name} for name in ("plurality", "mixture", "channel")},
    "other adapters": {"adapters": True},
    "other neighbours": {"kinds": ["json", None, "lark", "none"]},
}


@pytest.fixture(scope="module")
def played(lab):
    """Runs that ask for the same and differ in what a mask must not depend on."""
    done = {}

    def played(name):
        if name not in done:
            row = {key: value for key, value in VARIATIONS[name].items() if key in ROW}
            options = {key: value for key, value in VARIATIONS[name].items() if key not in ROW}
            if "adapters" in options:
                options["adapters"] = other_adapters(lab)
            done[name] = lab.run({**ROW, **row}, 1, **{"kinds": KINDS, **options})
        return done[name]

    return played


@pytest.mark.parametrize("name", VARIATIONS)
def test_every_mask_is_that_of_the_grammar_and_the_released_tokens(lab, played, name):
    check_all(lab, played(name))


def test_the_same_tokens_have_the_same_masks_in_all_runs_bit_for_bit(played):
    """Without a replay: over all runs, grammar and tokens determine the mask."""
    masks, num_same, answers = {}, 0, set()
    for name in VARIATIONS:
        run = played(name)
        answers.add(tuple(map(tuple, (stream.tokens for stream in run.streams))))
        for stream, kind in zip(run.streams, run.kinds, strict=True):
            for t, row in enumerate(run.recorder.rows_of(stream)):
                if kind != "none":
                    key = kind, *stream.tokens[:t]
                    num_same += key in masks
                    assert masks.setdefault(key, row.mask.tobytes()) == row.mask.tobytes()
    assert len(answers) > len(VARIATIONS) / 2, "runs that all say the same would prove little"
    assert num_same > 100


def test_runs_that_release_the_same_have_the_same_masks_whatever_the_secret(lab):
    """Under `plurality` the secret and the noise have no effect on tokens, so they must have none on masks."""
    row = {**ROW, "release": "plurality"}

    def other(curator):
        set_secret(curator, 4)
        with_noise(99)(curator)

    one, two = lab.run(row, 1, KINDS), lab.run(row, 1, KINDS, other)
    assert [stream.tokens for stream in one.streams] == [stream.tokens for stream in two.streams]
    for step, same in zip(one.recorder.steps, two.recorder.steps, strict=True):
        assert [each.mask.tobytes() for each in step] == [each.mask.tobytes() for each in same]


# --- masks that depend on more are found ------------------------------------------------------------------------------


def the_secret(curator, stream):
    return curator._releaser._secret._Secret__world.reveal() % 2 == 1


def the_belief(curator, stream):
    belief = curator._custody.belief.reveal()
    return belief.max() - belief.min() > 0


def the_votes(curator, stream):
    rows = curator._engine.rows_of(stream)
    return bool(rows) and rows[-1].is_dissent


def the_public_model(curator, stream):
    rows = curator._engine.rows_of(stream)
    return bool(rows) and rows[-1].public % 2 == 1


def the_noise(curator, stream):
    return curator._releaser._noise.words(1)[0] % 2 == 1


def the_charges(curator, stream):
    return stream.charged_units > NUM_PAID * PER_TOKEN * 2**60


def the_budget(curator, stream):
    return curator.account.spent_units > curator.account.total_units // 4


def another_stream(curator, stream):
    return sum(sum(other.tokens) for other in curator._running if other is not stream) % 2 == 1


def the_prompt(curator, stream):
    return len(stream.request.prompt) % 2 == 1


def the_steps_so_far(curator, stream):
    return len(curator._engine.steps) % 2 == 1


DEPENDENCES = (
    the_secret,
    the_belief,
    the_votes,
    the_public_model,
    the_noise,
    the_charges,
    the_budget,
    another_stream,
    the_prompt,
    the_steps_so_far,
)


def depending_on(is_changed):
    class Wrong(Curator):
        """Forbids one token more, where something that is not released says so."""

        def _masks_of(self, streams):
            masks = super()._masks_of(streams)
            for mask, stream in zip(masks, streams, strict=True):
                allowed = allowed_ids(mask, self._engine.vocabulary)
                if stream.grammar is not None and len(allowed) > 1 and is_changed(self, stream):
                    mask[allowed[0] // 32] &= ~np.uint32(1 << allowed[0] % 32)
            return masks

    return Wrong


@pytest.mark.parametrize("dependence", DEPENDENCES, ids=lambda dependence: dependence.__name__)
def test_a_mask_that_depends_on_more_is_found(lab, dependence):
    run = lab.run(ROW, 1, KINDS, curator_class=depending_on(dependence))
    with pytest.raises(AssertionError):
        check_all(lab, run)


def test_where_nothing_says_so_nothing_is_found(lab):
    check_all(lab, lab.run(ROW, 1, KINDS, curator_class=depending_on(lambda curator, stream: False)))


def test_a_grammar_that_remembers_other_answers_is_found(lab, monkeypatch):
    """Two answers follow one state: the mask of one of them is wrong, or is empty, which stops the curator."""
    start, states = Grammars.start, {}
    monkeypatch.setattr(Grammars, "start", lambda self, text: states.setdefault((id(self), text), start(self, text)))
    with pytest.raises((AssertionError, InvalidInput)):
        check_all(lab, lab.run(ROW, 1, KINDS))


# --- limits -----------------------------------------------------------------------------------------------------------

HEAVY = Grammar("start: /(.*[a-m0-5].{12}b){3}c/")


@pytest.fixture
def few_states(monkeypatch):
    """So that following HEAVY soon takes more than is allowed."""
    from llguidance import LLParserLimits

    monkeypatch.setattr(grammar, "_limits", lambda: LLParserLimits(max_lexer_states=300, verbose_errors=False))


def failing_at(state, tokens):
    """After how many of these tokens a limit is hit."""
    for number, token in enumerate(tokens):
        if state.has_failed:
            return number
        state.advance(token)
    return None


@pytest.fixture
def letters(small_tokenizer):
    return small_tokenizer.encode("ab" * 20, add_special_tokens=False)


def test_a_limit_is_hit_at_the_same_token_whatever_was_answered_before(few_states, letters, small_tokenizer):
    used, vocabulary = Grammars(small_tokenizer, len(small_tokenizer)), len(small_tokenizer)
    first, *later = [failing_at(used.start(HEAVY), letters[number:]) for number in (0, 1, 0, 0)]
    assert first is not None
    assert later[1:] == [first, first]
    assert failing_at(Grammars(small_tokenizer, vocabulary).start(HEAVY), letters) == first


def test_an_answer_that_hits_a_limit_ends_with_the_reason_and_the_others_go_on(few_states, lab, monkeypatch):
    """Its tokens are charged as any others."""
    monkeypatch.setitem(GRAMMARS, "lark", HEAVY)
    run = lab.run(ROW, 3, ["none", "lark", "choice", None])
    _, heavy, _ = run.streams
    assert [stream.finish_reason for stream in run.streams] == ["length", "grammar", "stop"]
    assert 0 < len(heavy.tokens) < heavy.request.max_new_tokens
    check_all(lab, run)
    check_charges(run)
    assert not masks_of(lab, run, 1)[-1].any()
    assert len(run.recorder.rows_of(heavy)) == len(heavy.tokens)


def test_tokens_that_only_the_model_has_are_never_allowed(small_tokenizer):
    """Vocabularies are padded; so are the words of a mask."""
    known = len(small_tokenizer)
    for grammar_of_kind in filter(None, GRAMMARS.values()):
        mask = Grammars(small_tokenizer, known + 70).start(grammar_of_kind).allowed
        assert mask.size == -(-(known + 70) // 32)
        assert 0 <= allowed_ids(mask, 32 * mask.size).max() < known


def test_a_parser_that_is_used_again_would_hit_a_limit_at_another_token(few_states, letters, small_tokenizer):
    """So the test above can fail: what earlier answers have built counts there."""
    state = Grammars(small_tokenizer, len(small_tokenizer)).start(HEAVY)
    matcher, first = state._matcher, failing_at(state, letters)
    matcher.reset()
    again = GrammarState(matcher, state.allowed.size, is_forced=False)
    assert failing_at(again, letters) != first
