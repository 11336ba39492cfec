"""What the public model and the private one write for the same prompts, with the same coins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paclm.cli.side_by_side import MarkedText, Screen, shortened
from paclm.config import format_budget

if TYPE_CHECKING:
    from paclm.curator.streams import Generation, Piece
    from paclm.study.lab import Lab


def compare_texts(lab: Lab, prompts: Mapping[str, int], temperature: float, screen: Screen) -> dict[str, Any]:
    """Show both models' texts side by side, and what the private ones cost; returns the figures."""
    from paclm.worlds.clinic import house_terms

    terms = house_terms()
    public = [
        MarkedText.of(prompt, [(text, "")], terms)
        for prompt, text in zip(prompts, public_texts(lab, prompts, temperature), strict=True)
    ]
    answers = private_texts(lab, prompts, temperature)
    private = [
        MarkedText.of(prompt, [(piece.text, piece.mark) for piece in pieces], terms)
        for prompt, (_, pieces) in zip(prompts, answers, strict=True)
    ]
    per_token = format_budget(lab.workspace.mechanism().per_token)
    pairs = list(zip(public, private, strict=True))
    screen.compare(("public model", f"private, {per_token} nats per token"), pairs)
    screen.legend({"disputed": "tokens on which worlds differ", "term": "this hospital's own names and words"})
    counts = [len({term for text in texts for term in text.terms}) for texts in (public, private)]
    screen.say(
        f"Of those names and words, the public model writes {counts[0]}, the private one {counts[1]}; not each stands "
        "in its right place, and names that only sound local are invented. The private text differs from run to run."
    )
    done = [answer for answer, _ in answers]
    last, charged = done[-1], sum(answer.charged_nats for answer in done)
    if lost := sum(answer.public_tokens for answer in done):
        screen.say(
            f"The budget of this workspace is exhausted: {lost} of these tokens come from the public model. To start "
            f"over, delete {shortened(lab.workspace.path)}."
        )
    tokens = sum(len(answer.tokens) for answer in done)
    dissent = sum(answer.marks.count("disputed") for answer in done)
    screen.say(
        f"{tokens} tokens, dissent on {dissent}; charged {charged:.3g} nats, spent so far {last.spent_nats:.3g} of "
        f"{last.total_nats:.3g}, {last.remaining_tokens:,} tokens left."
    )
    texts = [
        {
            "prompt": before.prompt,
            "public": before.continuation,
            "private": after.continuation,
            "house_terms_public": before.terms,
            "house_terms_private": after.terms,
        }
        for before, after in pairs
    ]
    spent = {"spent_nats": last.spent_nats, "remaining_tokens": last.remaining_tokens}
    return {"completions": texts, "tokens": tokens, "dissent": dissent, "charged_nats": charged, **spent}


def public_texts(lab: Lab, prompts: Mapping[str, int], temperature: float) -> list[str]:
    """Continuations by the public model alone, with so many tokens at most."""
    from paclm.curator.streams import encode_prompt
    from paclm.study.continuations import Continuations
    from paclm.study.decoding import Decoding

    encoded, longest = [encode_prompt(lab.tokenizer, prompt) for prompt in prompts], max(prompts.values())
    texts = Continuations(lab, "demo", max(map(len, encoded)) + longest, len(prompts))
    found = texts.alone(encoded, "public", Decoding("demo", temperature), longest).tolist()
    lab.release_engine()
    return [
        _decode(lab.tokenizer, prompt, tokens[:limit])
        for prompt, tokens, limit in zip(encoded, found, prompts.values(), strict=True)
    ]


def private_texts(lab: Lab, prompts: Mapping[str, int], temperature: float) -> list[tuple[Generation, list[Piece]]]:
    """Answers of the workspace's curator, all in one batch and charged, with their pieces."""
    from paclm.curator.curator import Curator

    with Curator.open(lab.workspace) as curator:
        seeds = [lab.seed_for("demo", "coins", number) for number in range(len(prompts))]  # those of `public_texts`
        streams = [
            curator.submit(curator.request(prompt, limit, temperature=temperature, coins_seed=seed, tag="command line"))
            for (prompt, limit), seed in zip(prompts.items(), seeds, strict=True)
        ]
        while any(stream.finish_reason is None for stream in streams):
            curator.step()
        return [(curator.result(stream), stream.take()) for stream in streams]


def _decode(tokenizer: Any, prompt: list[int], tokens: list[int]) -> str:
    """The text after the prompt, up to the end token."""
    if tokenizer.eos_token_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
    before, after = tokenizer.decode(prompt), tokenizer.decode(prompt + tokens)
    return str(after[len(before) :])
