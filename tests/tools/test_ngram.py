"""The Kneser–Ney model: probabilities sum to one, and match figures computed by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from tiny.ngram import discounts, next_token, token_nats, train_ngrams

END, A, B, C = range(4)


def tokens(*ids):
    return np.array(ids, dtype=np.uint16)


@pytest.fixture(scope="module")
def long_tailed():
    """Zipf-distributed tokens with some structure, so that every order has n-grams seen once, twice, … often."""
    rng = np.random.default_rng(5)
    drawn = 1 + np.minimum(rng.zipf(1.3, size=6000) - 1, 48)
    drawn[1::3] = 1 + (drawn[::3] * 7) % 49
    return [part.astype(np.uint16) for part in np.split(drawn, [1, 3, 500, 4000])]


@pytest.mark.parametrize(
    "context",
    [[], [0], [1], [1, 8], [0, 1, 8], [1, 8, 1, 1], [49], [49, 49, 49, 49], [0, 49, 49], [1, 2, 49, 48], [50]],
)
def test_probabilities_sum_to_one_after_seen_and_unseen_contexts(long_tailed, context):
    chances = next_token(train_ngrams(long_tailed, 51, END), context)
    assert chances.min() > 0
    assert chances.sum() == pytest.approx(1, abs=1e-12)


def test_the_loss_of_a_text_is_that_of_its_tokens_one_by_one(long_tailed):
    model = train_ngrams(long_tailed, 51, END)
    documents = [tokens(1, 8, 1, 2, 15, 3, 49, 50, 1, 8), tokens(2), tokens(8, 1, 1, 8)]
    expected = []
    for document in documents:
        history = [END, *document.tolist()]
        for i in range(1, len(history)):
            expected.append(-np.log(next_token(model, history[max(0, i - 4) : i])[history[i]]))
    np.testing.assert_allclose(token_nats(model, documents), expected, rtol=1e-12)


def test_a_bigram_model_agrees_with_one_worked_out_by_hand():
    # Documents "A B A B" and "A C". Bigrams: END A twice, A B twice, B A once, A C once. Too few for estimated
    # discounts: 0.5 off a count of one, 1 off a count of two.
    model = train_ngrams([tokens(A, B, A, B), tokens(A, C)], 4, END, order=2)
    # Left neighbours: A has two (END, B), B has one (A), C has one (A): four in all, discounts 1 + 0.5 + 0.5.
    unigram = {A: 1 / 4 + 1 / 2 / 4, B: 0.5 / 4 + 1 / 2 / 4, C: 0.5 / 4 + 1 / 2 / 4, END: 1 / 2 / 4}
    # After A: three bigrams, discounts 1 (A B) and 0.5 (A C), so half of the mass is left over.
    after_a = {
        A: 1.5 / 3 * unigram[A],
        B: 1 / 3 + 1.5 / 3 * unigram[B],
        C: 0.5 / 3 + 1.5 / 3 * unigram[C],
        END: 1.5 / 3 * unigram[END],
    }
    np.testing.assert_allclose(next_token(model, []), [unigram[t] for t in range(4)])
    np.testing.assert_allclose(next_token(model, [A]), [after_a[t] for t in range(4)])
    np.testing.assert_allclose(next_token(model, [C]), [unigram[t] for t in range(4)])  # nothing was seen after C
    # After END: A twice, of which 1 is taken off.
    chance_of_opening = 1 / 2 + 1 / 2 * unigram[A]
    np.testing.assert_allclose(np.exp(-token_nats(model, [tokens(A, B)])), [chance_of_opening, after_a[B]])


def test_a_word_with_one_left_neighbour_counts_once_however_frequent():
    """What sets Kneser–Ney apart: a common second half of a name is no likely word elsewhere."""
    documents = [tokens(A, C, A, C, A, C, A, C), tokens(B, A, B), tokens(B, B)]
    unigram = next_token(train_ngrams(documents, 4, END, order=2), [])
    assert unigram[B] > unigram[C]


def test_contexts_do_not_reach_over_the_start_of_a_document(long_tailed):
    model = train_ngrams(long_tailed, 51, END)
    together = token_nats(model, [tokens(5, 6, 7), tokens(1, 8)])
    np.testing.assert_allclose(together[3:], token_nats(model, [tokens(1, 8)]))


def test_more_context_lowers_the_loss_on_text_that_depends_on_it(long_tailed):
    held_out = [long_tailed[-1]]
    losses = [token_nats(train_ngrams(long_tailed[:-1], 51, END, order), held_out).mean() for order in (1, 2)]
    assert losses[1] < losses[0] - 0.2


def test_discounts_follow_chen_and_goodman_where_the_counts_allow():
    counts = np.repeat([1, 2, 3, 4, 9], [100, 40, 20, 10, 5])
    share = 100 / 180
    np.testing.assert_allclose(
        discounts(counts), [0, 1 - 2 * share * 0.4, 2 - 3 * share * 0.5, 3 - 4 * share * 0.5], rtol=1e-12
    )
    np.testing.assert_allclose(discounts(np.array([1, 1, 2])), [0, 0.5, 1.0, 1.5])
