"""Distill a few tokens, for tests and for the driver that kills it."""

from contextlib import contextmanager

from paclm.curator.beginnings import Beginnings
from paclm.curator.distill import open_distiller, text_settings

PROMPTS = ((5,), (6, 7))


@contextmanager
def distiller_of(workspace, decoder, prompts=PROMPTS, length=12):
    settings = text_settings(decoder, workspace, Beginnings(list(prompts), "a few prompts"), length)
    with open_distiller(workspace, decoder, settings) as distiller:
        yield distiller


def distill(workspace, decoder, num_tokens, **options):
    """The plan, and the text."""
    with distiller_of(workspace, decoder, **options) as distiller:
        plan = distiller.plan(num_tokens)
        distiller.generate(num_tokens)
        return plan, distiller.text(num_tokens)


def transcripts(workspace):
    return sorted(workspace.curator_path.glob("distill-*.sealed"))
