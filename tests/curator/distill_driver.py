"""Kill a distillation with SIGKILL before each touch of the disk, and compare what was released, charged and kept.

    python distill_driver.py WORKSPACE TOKENS charged-first|kept-first

A touch is a statement of SQLite or a call that writes or syncs. The driver forks a process for each life: the first is
killed before its first touch, the second before its second, and so on; the last one comes to its end. All go on with
the same text. Prints a JSON list with one entry a life.
"""

import json
import os
import signal
import sys

from deployments import ScriptedEngine
from distilling import distiller_of
from rotation_driver import NEVER, Fate

from paclm import Curator
from paclm.curator.distill import Distiller
from paclm.ledger.events import Usage
from paclm.worlds.workspace import Workspace

STREAMS = 4
KILLS = 18


def keep_first(curator, transcript):
    """What must never be: text is on disk before it is charged."""
    custody, append, waiting = type(curator._custody), transcript.append, []
    commit = custody.commit
    custody.commit = lambda *arguments: waiting.append(arguments)

    def append_first(*arguments, **options):
        append(*arguments, **options)
        commit(*waiting.pop())

    transcript.append = append_first


def live(workspace, tokenizer, num_tokens, order, last, pipe):
    """Distill, and say on the pipe what each step releases, until the touch that is the last."""
    with Curator.open(workspace, engine=ScriptedEngine(num_slots=STREAMS), tokenizer=tokenizer) as curator:
        say, step = os.write, curator.step

        def told():
            pieces = step()
            released = [(f"{stream.coins.seed:x}", piece.token) for stream, piece in pieces]
            say(pipe, f"step {json.dumps(released)}\n".encode())
            return pieces

        curator.step = told
        with distiller_of(workspace, curator) as distiller:
            if order == "kept-first":
                keep_first(curator, distiller._transcript)
            fate = Fate(last, pipe)
            fate.begin(curator._custody)
            distiller.generate(num_tokens)
            fate._left = NEVER


def live_and_die(workspace, tokenizer, num_tokens, order, last, released):
    """Whether it was killed, and before which touch."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        status = 1
        try:
            live(workspace, tokenizer, num_tokens, order, last, writing)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        *lines, at = pipe.read().split("\n")
    for line in lines:
        for seed, token in json.loads(line.removeprefix("step ")):
            released.setdefault(seed, []).append(token)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, at


def look(workspace, tokenizer):
    """What the next opening finds."""
    with (
        Curator.open(workspace, engine=ScriptedEngine(num_slots=STREAMS), tokenizer=tokenizer) as curator,
        distiller_of(workspace, curator) as distiller,
    ):
        kept = distiller._transcript
        usage = curator.usage().by_tag.get(kept.tag, Usage(kept.tag))
        return {
            "charged_tokens": usage.tokens,
            "charged_units": usage.units,
            "kept_tokens": kept.num_tokens,
            "kept_units": kept.charged_units,
            "kept": {f"{text.coins_seed:x}": text.tokens for text in kept.texts},
        }


def main():
    path, num_tokens, order = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)  # no thread pools before a fork
    Distiller._check_charged = lambda self: None  # it would refuse what the wrong order leaves: here that is counted
    workspace = Workspace.open(path)
    tokenizer = AutoTokenizer.from_pretrained(workspace.base.folder)
    look(workspace, tokenizer)  # makes ledger and secret
    lives, released = [], {}
    for last in (*range(1, KILLS + 1), NEVER):
        was_killed, at = live_and_die(workspace, tokenizer, num_tokens, order, last, released)
        life = {"was_killed": was_killed, "at": at, "num_kills": len(lives) + was_killed}
        lives.append({**life, "released": {seed: list(tokens) for seed, tokens in released.items()}})
        lives[-1] |= look(workspace, tokenizer)
    print(json.dumps(lives))


if __name__ == "__main__":
    main()
