"""Make the embedded base model `tiny`, one command per step.

    python tools/tiny tokenizer --corpora DIR --out TOKENIZER     # a minute on two cores
    python tools/tiny train --corpora DIR --tokenizer TOKENIZER --out MODEL --minutes 11     # one GPU
    python tools/tiny evaluate                        # bits per byte on synthetic notes: needs no file
    python tools/tiny evaluate --corpora DIR          # … on passages of held-out books and articles
    python tools/tiny ngram --corpora DIR             # … of a 5-gram model, for comparison
    python tools/tiny card --run RUN                  # the model card, from what the others measured

DIR holds public-books.jsonl.xz and public-simplewiki.jsonl.xz; the notes of made-up hospitals are written on the way.
The first two commands need torch, transformers, tokenizers, safetensors and numpy only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "src" / "paclm" / "data" / "tiny"
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "src")]


def make_tokenizer(args: argparse.Namespace) -> None:
    from tiny.data import read_corpora
    from tiny.notes import Hospitals, written_by_all
    from tiny.tokenizer import sample_texts, save_tokenizer, train_tokenizer

    texts = [corpus.train for corpus in read_corpora(args.corpora, args.max_records)]
    notes = written_by_all(Hospitals(count=args.hospitals).train, args.notes_each)
    tokenizer = train_tokenizer(sample_texts([*texts, notes]), args.vocab_size)
    save_tokenizer(tokenizer, args.out, args.context)


def train(args: argparse.Namespace) -> None:
    from tiny.model import Shape
    from tiny.notes import Hospitals
    from tiny.train import Plan, train_tiny

    shape = Shape(
        context=args.context,
        width=args.width,
        num_layers=args.layers,
        num_heads=args.heads,
        hidden=args.hidden,
        dropout=args.dropout,
    )
    plan = Plan(
        minutes=args.minutes,
        reserve_seconds=args.reserve_seconds,
        batch=args.batch,
        notes_share=args.notes_share,
        hospitals=Hospitals(count=args.hospitals, notes_each=args.notes_each),
        lr=args.lr,
        weight_decay=args.weight_decay,
        seed=args.seed,
        seconds_per_evaluation=args.evaluate_every,
        is_compiled=not args.no_compile,
    )
    train_tiny(args.corpora, args.tokenizer, args.out, plan, shape, args.max_records)
    if args.part_mib:
        split_file(args.out / "model.safetensors", args.part_mib * 2**20)
    (args.out / "DONE").touch()


def split_file(path: Path, part_bytes: int) -> None:
    """Cut a file into numbered parts that `cat` joins again."""
    data = path.read_bytes()
    for number, first in enumerate(range(0, len(data), part_bytes)):
        path.with_name(f"{path.name}.part{number}").write_bytes(data[first : first + part_bytes])


def evaluate(args: argparse.Namespace) -> None:
    from tiny.check import held_out_sets, note_sets, passage_sets
    from tiny.data import read_corpora
    from tiny.evaluate import Reader, measure

    began = time.monotonic()
    reader = Reader.load(args.model)
    if args.corpora is None:
        if args.all:
            raise SystemExit("--all scores the whole held-out books and articles: say where they are with --corpora.")
        found = {"notes": measure(reader.score, note_sets())}
    elif args.all:
        found = {"held_out": measure(reader.score, held_out_sets(read_corpora(args.corpora)))}
    else:
        found = {"passages": measure(reader.score, passage_sets(read_corpora(args.corpora)))}
    print_json(found, began)


def score_ngrams(args: argparse.Namespace) -> None:
    from tiny.check import held_out_sets, passage_sets
    from tiny.data import encode_documents, read_corpora
    from tiny.evaluate import Score, count_bytes, measure
    from tiny.ngram import token_nats, train_ngrams
    from tiny.tokenizer import end_of_text_id, load_tokenizer

    began = time.monotonic()
    tokenizer = load_tokenizer(args.model)
    corpora = read_corpora(args.corpora)
    documents = [document for corpus in corpora for document in encode_documents(tokenizer, corpus.train, batch=256)]
    model = train_ngrams(documents, tokenizer.get_vocab_size(), end_of_text_id(tokenizer))

    def score(texts: list[str]) -> Score:
        nats = token_nats(model, encode_documents(tokenizer, texts))
        return Score(float(nats.sum()), len(nats), count_bytes(texts))

    sets = {"passages": passage_sets(corpora), "held_out": held_out_sets(corpora)}
    print_json({name: measure(score, texts) for name, texts in sets.items()}, began)


def write_card(args: argparse.Namespace) -> None:
    from tiny.card import gather, measure_notes, read_facts, write_pages

    facts = read_facts(args.docs) if args.run_folder is None else gather(args.run_folder, args.model, args.docs)
    write_pages(measure_notes(facts, args.model), args.docs, args.model)


def print_json(found: dict[str, object], began: float) -> None:
    print(json.dumps(found | {"seconds": round(time.monotonic() - began, 1)}, indent=2))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    sub = commands.add_parser("tokenizer", help="train the byte-level BPE tokenizer")
    sub.set_defaults(run=make_tokenizer)
    sub.add_argument("--corpora", type=Path, required=True)
    sub.add_argument("--out", type=Path, required=True)
    sub.add_argument("--vocab-size", type=int, default=8192)
    sub.add_argument("--context", type=int, default=512)
    sub.add_argument("--hospitals", type=int, default=20_000, help="as in train: the last 1 %% are held out")
    sub.add_argument("--notes-each", type=int, default=3, help="a sample is enough")
    sub.add_argument("--max-records", type=int, help="take only the front of each corpus, for trials")

    sub = commands.add_parser("train", help="train the model inside a wall-clock budget")
    sub.set_defaults(run=train)
    sub.add_argument("--corpora", type=Path, required=True)
    sub.add_argument("--tokenizer", type=Path, required=True, help="folder that holds tokenizer.json")
    sub.add_argument("--out", type=Path, required=True)
    sub.add_argument("--minutes", type=float, default=11.0, help="wall clock of the whole run")
    sub.add_argument("--reserve-seconds", type=float, default=40.0, help="of it, kept for the end")
    sub.add_argument("--batch", type=int, default=256, help="sequences a step")
    sub.add_argument("--notes-share", type=float, default=0.5, help="of the sequences of a step")
    sub.add_argument("--hospitals", type=int, default=20_000, help="made-up hospitals; the last 1 %% are held out")
    sub.add_argument("--notes-each", type=int, default=40, help="notes of each hospital")
    sub.add_argument("--lr", type=float, default=4e-3)
    sub.add_argument("--weight-decay", type=float, default=0.2)
    sub.add_argument("--dropout", type=float, default=0.05)
    sub.add_argument("--context", type=int, default=512)
    sub.add_argument("--width", type=int, default=320)
    sub.add_argument("--layers", type=int, default=8)
    sub.add_argument("--heads", type=int, default=5)
    sub.add_argument("--hidden", type=int, default=1152)
    sub.add_argument("--seed", type=int, default=1)
    sub.add_argument("--evaluate-every", type=float, default=60.0, help="seconds between held-out evaluations")
    sub.add_argument("--no-compile", action="store_true")
    sub.add_argument("--max-records", type=int, help="take only the front of each corpus, for trials")
    sub.add_argument("--part-mib", type=int, help="also write model.safetensors in parts of this size")

    sub = commands.add_parser("evaluate", help="bits per byte of a model, on a CPU in a minute")
    sub.set_defaults(run=evaluate)
    sub.add_argument("--model", type=Path, default=SHIPPED, help="Hugging Face folder (default: the shipped tiny)")
    sub.add_argument("--corpora", type=Path, help="score held-out passages of these (default: synthetic notes)")
    sub.add_argument("--all", action="store_true", help="score all of the held-out text (minutes on a GPU)")

    sub = commands.add_parser("ngram", help="bits per byte of a 5-gram model trained on the same tokens")
    sub.set_defaults(run=score_ngrams)
    sub.add_argument("--corpora", type=Path, required=True)
    sub.add_argument("--model", type=Path, default=SHIPPED, help="folder that holds tokenizer.json")

    sub = commands.add_parser("card", help="write the model card from what was measured")
    sub.set_defaults(run=write_card)
    sub.add_argument("--run", dest="run_folder", type=Path, help="folder of a training run and its measurements")
    sub.add_argument("--model", type=Path, default=SHIPPED)
    sub.add_argument("--docs", type=Path, default=ROOT / "docs")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_args()
    arguments.run(arguments)
