"""The tools that make `tiny`: one function with Hugging Face's GPT-2, one optimizer with PyTorch's."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from paclm.worlds.clinic import PRIVATE_SEED
from tiny.data import count_bytes, encode_documents, pack, pieces
from tiny.evaluate import score_documents, windows
from tiny.model import Shape, TinyGPT2, to_hugging_face
from tiny.notes import NEVER_TRAINED, Hospitals, encoded_by_all, write_notes
from tiny.optimizer import Muon
from tiny.tokenizer import train_tokenizer
from tiny.train import Source, batches, lr_share, mixed_batches

SMALL = Shape(vocab_size=97, context=32, width=64, num_layers=2, num_heads=1, hidden=160, dropout=0.1)


def test_the_shipped_shape_stays_under_twelve_million_parameters():
    assert sum(p.numel() for p in TinyGPT2(Shape()).parameters()) == 11_993_216


def test_the_training_model_is_the_same_function_as_its_hugging_face_twin():
    torch.manual_seed(0)
    model = TinyGPT2(SMALL).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # biases and norms away from zero and one
        tokens = torch.randint(97, (3, 32))
        torch.testing.assert_close(to_hugging_face(model, 0)(tokens).logits, model.logits(tokens), rtol=1e-4, atol=1e-4)


def test_muon_takes_the_steps_of_pytorch_muon():
    torch.manual_seed(1)
    start = [torch.randn(24, 40), torch.randn(40, 24), torch.randn(24, 40)]
    ours, theirs = ([torch.nn.Parameter(m.clone()) for m in start] for _ in range(2))
    settings = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.95}
    optimizers = (Muon(ours, **settings), torch.optim.Muon(theirs, **settings, adjust_lr_fn="match_rms_adamw"))
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-3)  # bfloat16 inside; a step moves entries by 0.01
        assert (mine - start[0].reshape(mine.shape)).abs().max() > 4e-3


def test_muon_treats_fused_query_key_value_as_three_matrices():
    torch.manual_seed(2)
    fused = torch.nn.Parameter(torch.randn(16, 48))
    parts = [torch.nn.Parameter(p.clone()) for p in fused.detach().chunk(3, 1)]
    fused.grad = torch.randn(16, 48)
    for part, grad in zip(parts, fused.grad.chunk(3, 1), strict=True):
        part.grad = grad.clone()
    Muon([fused], 0.01, 0.1).step()
    Muon(parts, 0.01, 0.1).step()
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in parts], 1))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 47, 48, 49, 100])
def test_windows_score_every_token_exactly_once_with_half_a_context_before_it(length):
    document = np.arange(1, length + 1, dtype=np.uint16)
    scored = []
    for number, (tokens, first) in enumerate(windows(document, 0, 32)):
        assert len(tokens) <= 33
        assert number == 0 or first >= 16
        scored += tokens[1 + first :].tolist()
    assert scored == document.tolist()


def test_a_uniform_model_scores_the_logarithm_of_its_vocabulary():
    documents = [np.arange(100, dtype=np.uint16) % 7, np.arange(5, dtype=np.uint16)]
    score = score_documents(
        lambda tokens: torch.zeros(*tokens.shape, 97), documents, 105, 0, 32, torch.device("cpu"), batch=3
    )
    assert score.num_tokens == 105
    assert score.total_nats == pytest.approx(105 * np.log(97), rel=1e-5)


def test_cutting_a_long_text_into_pieces_does_not_change_its_tokens():
    rng = np.random.default_rng(3)
    words = ["fever", "12", "2019", "\nnote", "\n\n8", "\n", "  ", "\n \n", "b.i.d.", "she's", "—", "\t"]
    text = " ".join(words[i] for i in rng.integers(len(words), size=4000))
    tokenizer = train_tokenizer(iter([text]), 300)
    cut = list(pieces(text, 500))
    assert len(cut) > 10
    assert "".join(cut) == text
    assert [t for piece in cut for t in tokenizer.encode(piece).ids] == tokenizer.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_numbers_are_cut_from_the_left_in_pairs_of_digits():
    tokenizer = train_tokenizer(iter(["in 2019 and 2019 and 2019, 142/88 142/88 " * 50]), 300)
    assert [tokenizer.decode([t]) for t in tokenizer.encode("2019 142/88").ids] == ["20", "19", " 14", "2", "/", "88"]


def documents_of(*lengths):
    """Documents without token 0, each of one token of its own."""
    return [np.full(length, number, dtype=np.uint16) for number, length in enumerate(lengths, 1)]


def test_packing_puts_end_of_text_before_every_document():
    assert pack(documents_of(2, 1, 3), 0).tolist() == [0, 1, 1, 0, 2, 0, 3, 3, 3]


def epoch_of(name, documents, context, rows=2):
    """Sequences of the first epoch, each a list."""
    drawn = []
    for epoch, tokens in batches(Source(name, documents, 1, rows), 0, context, torch.device("cpu"), 1):
        if epoch >= 1:
            return drawn
        drawn += tokens.tolist()
    return None


def test_sequences_of_notes_begin_with_a_note_and_every_note_is_read_whole():
    documents = documents_of(*([5, 9, 3, 7] * 30))
    sequences = epoch_of("notes", documents, 24)
    assert all(len(sequence) == 25 and sequence[0] == 0 for sequence in sequences)
    read = " ".join(",".join(map(str, sequence)) for sequence in sequences)
    whole = [",".join(map(str, [0, *document])) in read for document in documents]
    assert sum(whole) >= len(documents) - 5, "only notes of the last sequences, which fill no batch, are left out"


def test_notes_longer_than_the_context_are_read_to_their_end():
    note = np.arange(1, 200, dtype=np.uint16)
    sequences = epoch_of("notes", [note], 24, rows=1)
    assert set(range(1, 190)) <= {token for sequence in sequences for token in sequence}


def test_sequences_of_long_texts_cover_them_once_from_another_offset_each_epoch():
    text = np.arange(1, 2001, dtype=np.uint16)
    source = batches(Source("text", [text], 1, 4), 0, 32, torch.device("cpu"), 1)
    firsts = {}
    for epoch, tokens in source:
        if epoch >= 2:
            break
        firsts.setdefault(int(epoch), []).extend(tokens[:, 0].tolist())
    assert len(firsts[0]) == len(set(firsts[0])) == 60
    assert len({first % 32 for first in firsts[0]}) == 1
    assert {first % 32 for first in firsts[0]} != {first % 32 for first in firsts[1]}


def test_a_step_has_its_share_of_notes_and_epochs_are_counted_by_source():
    sources = [Source("text", [np.full(900, 1, np.uint16)], 1, 6), Source("notes", documents_of(*[9] * 30), 1, 2)]
    drawn = mixed_batches(sources, 0, 20, torch.device("cpu"), 1)
    for _ in range(12):
        epochs, tokens = next(drawn)
        assert tokens.shape == (8, 21)
        assert [0 in sequence[:1] for sequence in tokens.tolist()[6:]] == [True, True]
    assert 1.5 < epochs["text"] < 2
    assert epochs["notes"] > 1
    with pytest.raises(SystemExit, match="300 tokens of notes do not fill 40 sequences"):
        next(mixed_batches([Source("notes", documents_of(*[9] * 30), 1, 40)], 0, 20, torch.device("cpu"), 1))


def test_no_hospital_is_both_trained_on_and_measured():
    hospitals = Hospitals(count=250, notes_each=3)
    assert (len(hospitals.train), len(hospitals.held_out)) == (247, 3)
    assert not set(hospitals.train) & {*hospitals.held_out, PRIVATE_SEED, *NEVER_TRAINED}
    assert not set(hospitals.held_out) & {PRIVATE_SEED, *NEVER_TRAINED}


def test_notes_written_on_all_cores_are_those_of_the_hospitals_in_order():
    seeds, tokenizer = range(1_000_000, 1_000_009), train_tokenizer(iter(write_notes(5, 20)), 400)
    texts = [text for seed in seeds for text in write_notes(seed, 2)]
    documents, num_bytes = encoded_by_all(tokenizer, seeds, 2)
    assert [document.tolist() for document in documents] == [d.tolist() for d in encode_documents(tokenizer, texts)]
    assert num_bytes == count_bytes(texts)
    assert len(set(texts)) == 18


def test_the_schedule_warms_up_then_falls_to_zero():
    shares = [lr_share(p / 100, 0.02) for p in range(101)]
    assert shares[0] == 0
    assert max(shares) == shares[2] == 1
    assert shares[2:] == sorted(shares[2:], reverse=True)
    assert shares[100] == pytest.approx(0, abs=1e-12)
