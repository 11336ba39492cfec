"""What must hold of every run, computed from grammars, released tokens and recorded ballots alone."""

import numpy as np

from paclm.privacy.randomness import Coins
from structured.answers import GRAMMARS, IS_ANSWER
from structured.recorder import allowed_ids, public_masks
from structured.runs import units_of

NEAR = 1e-4
"""Scores closer than this may go either way: batches of other shapes sum in another order."""


def check_run(lab, run):
    """Every check of this file."""
    for number, stream in enumerate(run.streams):
        check_masks(lab, run, number)
        check_ballots(lab, run, number)
        check_answer(lab, run, number)
        if run.row["release"] == "dp":
            check_logprobs(lab, run, number)
        assert stream.finish_reason != "cancelled"
    check_charges(run)


def masks_of(lab, run, number):
    """Before each token of a stream and after its last, computed once."""
    if number not in run.masks:
        stream, grammar = run.streams[number], GRAMMARS[run.kinds[number]]
        run.masks[number] = public_masks(lab.tokenizer, run.recorder.vocabulary, grammar, stream.tokens)
    return run.masks[number]


def check_masks(lab, run, number):
    """Masks are those of grammar and released tokens, also of a step in flight when the answer ended."""
    stream, expected = run.streams[number], masks_of(lab, run, number)
    rows, vocabulary = run.recorder.rows_of(stream), run.recorder.vocabulary
    assert len(rows) - len(stream.tokens) in (0, 1)
    for t, row in enumerate(rows):
        assert row.context == [*stream.request.prompt, *stream.tokens[:t]]
        if row.mask is None:
            assert run.kinds[number] == "none"
        else:
            assert np.array_equal(row.mask, expected[t])
        if t < len(stream.tokens):
            assert stream.tokens[t] in allowed_ids(expected[t], vocabulary)


def check_ballots(lab, run, number):
    """Support and votes are those of the models one by one, without pages, chunks, neighbours or workers."""
    stream, expected = run.streams[number], masks_of(lab, run, number)
    rows, prompt = run.rows[number], len(stream.request.prompt)
    logits = lab.logits(run.row, run.workspace, [*stream.request.prompt, *stream.tokens])
    for t, row in enumerate(rows):
        allowed = allowed_ids(expected[t], run.recorder.vocabulary)
        own = logits[:, prompt + t - 1]  # (W, V)
        size = min(run.row["support"], len(allowed))
        support, coins = row.support[:size], row.coins
        assert (row.support[size:] == -1).all()
        assert len(set(support)) == size
        assert np.isin(support, allowed).all()
        check_order(own[-1], support, np.setdiff1d(allowed, support))
        if stream.request.temperature:
            assert np.array_equal(coins, Coins(stream.request.coins_seed, t).gumbel(len(coins)))
        scores = own[:, support] + row.temperature * coins[:size]
        for world, vote in enumerate([*row.votes.tolist(), row.public]):
            (place,) = np.flatnonzero(support == vote)
            assert scores[world, place] >= scores[world].max() - NEAR


def check_order(logits, support, rest):
    """The support is in the order of the public logits, and none of the rest has a larger one."""
    inside = logits[support]
    assert (np.diff(inside) <= NEAR).all()
    assert logits[rest].max(initial=-np.inf) <= inside[-1] + NEAR


def check_answer(lab, run, number):
    """A complete answer is one of its grammar; what ends otherwise says why."""
    stream, kind = run.streams[number], run.kinds[number]
    end = lab.tokenizer.eos_token_id
    text = lab.tokenizer.decode([token for token in stream.tokens if token != end])
    is_cut = any(stop in text for stop in stream.request.stop)
    mask = masks_of(lab, run, number)[-1]
    if stream.finish_reason == "stop" and not is_cut:
        assert stream.tokens[-1] == end or not mask.any()
        assert IS_ANSWER[kind](stream.text)
    elif stream.finish_reason == "length":
        assert len(stream.tokens) == stream.request.max_new_tokens
        assert not is_cut
    else:
        assert stream.finish_reason == "stop"
        assert not any(stop in stream.text for stop in stream.request.stop)


def check_charges(run):
    """Marks, charges and ledger follow the plain rule, also where one token is allowed: b each, or b for dissent."""
    price, left = units_of(run.row), run.budget_units
    found = {stream.handle: [] for stream in run.streams}
    by_handle = {stream.handle: (stream, rows) for stream, rows in zip(run.streams, run.rows, strict=True)}
    for step in run.recorder.steps:
        for row in step:
            stream, rows = by_handle[row.handle]
            if row not in rows:
                continue  # the answer had ended
            token = stream.tokens[len(found[row.handle])]
            if left is None:
                expected, tokens = ("dp", 0), {row.public}
            elif left < price:
                expected, tokens = ("public", 0), {row.public}
            else:
                is_charged = run.row["charge"] == "every-token" or row.is_dissent
                expected = ("disputed" if row.is_dissent else "agreed", price * is_charged)
                tokens = set(row.votes.tolist())
                left -= expected[1]
            assert token in tokens
            found[row.handle].append(expected)
    for stream in run.streams:
        marks = [mark for mark, _ in found[stream.handle]]
        assert stream.marks == marks
        assert [piece.units for piece in stream.take()] == [units for _, units in found[stream.handle]]
    if run.state is not None:
        every = [charge for charges in found.values() for charge in charges]
        account = run.state.account
        assert account.spent_units == sum(units for _, units in every) == run.budget_units - left
        assert account.tokens == sum(mark != "public" for mark, _ in every)
        assert account.dissent_tokens == sum(mark == "disputed" for mark, _ in every)
        assert account.charged_tokens == sum(units > 0 for _, units in every)


def check_logprobs(lab, run, number):
    """Over the whole vocabulary, whatever the mask allows; none of a forbidden token."""
    stream, masks = run.streams[number], masks_of(lab, run, number)
    if stream.request.num_logprobs is None:
        assert stream.logprobs == []
        return
    prompt, vocabulary = len(stream.request.prompt), run.recorder.vocabulary
    logits = lab.logits(run.row, run.workspace, [*stream.request.prompt, *stream.tokens])[0].astype(float)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for t, (token, found) in enumerate(zip(stream.tokens, stream.logprobs, strict=True)):
        allowed = allowed_ids(masks[t], vocabulary)
        assert abs(found.own - logs[prompt + t - 1, token]) < NEAR
        assert len(found.top) == min(stream.request.num_logprobs, run.row["support"], len(allowed))
        for other, value in found.top:
            assert other in allowed
            assert abs(value - logs[prompt + t - 1, other]) < NEAR
