"""Runs of small models with structured output: one run has a value of each feature, and everything seeded."""

import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

from curator.deployments import CONTEXT, build_workspace, set_mechanism
from curator.dp_deployments import with_dp_adapter
from curator.joined import joined
from paclm import Curator
from paclm.config import RuntimeConfig
from paclm.curator.dp_decoder import DpDecoder
from paclm.curator.redacted import Redacted
from paclm.curator.secret import Secret
from paclm.engine.adapters import AdapterStack
from paclm.engine.base_model import base_of, load_model
from paclm.engine.generic import attach
from paclm.engine.kv_cache import PAGES
from paclm.engine.launch import start_workers
from paclm.engine.loading import open_engine
from paclm.engine.weights import unsupported
from paclm.engine.worker import run_worker
from paclm.errors import BudgetExceeded
from paclm.ledger.verify import verify
from paclm.privacy.accounting import units_up
from paclm.privacy.randomness import NoiseSource
from paclm.worlds.layout import DP_FILE, WORLDS_FILE
from paclm.worlds.workspace import Workspace
from structured.answers import GRAMMARS, MOST_TOKENS
from structured.features import FEATURES
from structured.recorder import Recorder

WORLDS = 6
PER_TOKEN = 2.0**-8
MOST_SEQUENCES = 3
"""So that the last of four streams waits for room."""
PAGE = PAGES["cpu"]
"""Of processes that no test has changed."""
NUM_PAID = 5
"""Tokens that a budget which ends too soon pays for."""
MIXED = dict(
    zip(
        FEATURES,
        ("gaussian", "json", "gpt2", "ample", "every-token", "gumbel", 1, "all", 64, 128, 3, False, None, 4),
        strict=True,
    )
)
"""A row with grammars of all kinds in one batch."""
STOP = ("fal", "-b", "sur", "]", "1")
PROMPTS = (
    "the patient reports mild fever since morning",
    "the nurse",
    "blood pressure normal, review next week at the clinic",
    "plan: rest and fluids",
)
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
OTHERS = {
    "llama": lambda size: LlamaForCausalLM(LlamaConfig(vocab_size=size, **SHAPE)),
    "generic": lambda size: Olmo2ForCausalLM(Olmo2Config(vocab_size=size, **SHAPE)),
}


class SeededNoise(NoiseSource):
    """As the curator takes it, and the same in every run."""

    is_private = True

    def __init__(self, seed):
        self._generator = np.random.PCG64(seed)

    def words(self, size):
        return self._generator.random_raw(size)


@dataclass
class Run:
    """A run that is over."""

    row: dict
    workspace: Workspace
    recorder: Recorder
    streams: list
    kinds: list
    """Of the streams' grammars."""
    num_refused: int
    budget_units: int | None
    """None under the promise `corpus`."""
    state: object = None
    """Of the ledger."""
    rows: list = field(default_factory=list)
    """Of each stream, one per token."""
    masks: dict = field(default_factory=dict)
    """Of each stream, computed from public values; see `checks`."""


class Lab:
    """Workspaces, references and one group of worker processes, made when they are first needed."""

    def __init__(self, folder, texts, small_base, tokenizer):
        self.tokenizer = tokenizer
        self._folder = folder
        self._texts = texts
        self._bases = {"gpt2": small_base}
        self._templates = {}
        self._references = {}
        self._resources = ExitStack()
        self._group = None
        self._num_copies = 0

    def close(self):
        self._resources.close()

    def workspace(self, row, **mechanism):
        """A copy with adapters in the layers of this row, and its settings."""
        self._num_copies += 1
        path = shutil.copytree(self._template(row).path, self._folder / f"run-{self._num_copies}")
        set_mechanism(path, support_size=row["support"], **mechanism)
        opened = Workspace.open(path)
        return with_dp_adapter(opened) if row["release"] == "dp" else opened

    def engine(self, row, workspace, stack, adapters=None, worker=None):
        """With pages, chunks and workers as the row says; whatever is open is closed with the stack."""
        runtime = RuntimeConfig(device="cpu", max_sequences=MOST_SEQUENCES, context=CONTEXT, prefill_chunk=row["chunk"])
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setitem(PAGES, "cpu", row["page"])
        file = workspace.adapters_path / (DP_FILE if row["release"] == "dp" else WORLDS_FILE)
        adapters = adapters or AdapterStack.load(file)
        if row["release"] == "dp":
            return open_engine(workspace, row["support"], runtime, adapters.as_public())
        if row["workers"] == 1:
            return open_engine(workspace, row["support"], runtime, adapters)
        if worker is None and row["model"] == "gpt2" and row["page"] == PAGE:
            return open_engine(workspace, row["support"], runtime, adapters, self._processes())
        group = stack.enter_context(joined(workspace, worker or run_worker))
        return open_engine(workspace, row["support"], runtime, workers=group)

    def logits(self, row, workspace, tokens):
        """Of every world and the public model, the last, after each token: (W, T, V), by the model's own code."""
        is_dp = row["release"] == "dp"
        key = row["model"], row["layers"], is_dp
        if key not in self._references:
            adapters = AdapterStack.load(workspace.adapters_path / (DP_FILE if is_dp else WORLDS_FILE))
            assert adapters.trunk == (row["layers"] == "top")
            model = load_model(base_of(workspace), torch.float32).eval()
            assert (unsupported(model) is None) == (row["model"] != "generic")
            attach(model, adapters.as_public() if is_dp else adapters.with_public())
            self._references[key] = model, 1 if is_dp else WORLDS + 1
        model, num_rows = self._references[key]
        with torch.inference_mode():
            return model(input_ids=torch.tensor([tokens] * num_rows)).logits.numpy()

    def _template(self, row):
        key = row["model"], row["layers"]
        if key not in self._templates:
            if row["model"] not in self._bases:
                self._bases[row["model"]] = self._base(row["model"])
            top = 1 if row["layers"] == "top" else None
            self._templates[key] = build_workspace(
                self._folder / "-".join(key), self._texts[:40], self._bases[row["model"]], WORLDS, top=top
            )
        return self._templates[key]

    def _base(self, name):
        torch.manual_seed(7)
        model = OTHERS[name](len(self.tokenizer))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.15)
        folder = self._folder / f"base-{name}"
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return folder

    def _processes(self):
        """Two real processes, started once; they get the adapters of each run over the wire."""
        if self._group is None:
            template = self._template({"model": "gpt2", "layers": "all"})
            self._group = self._resources.enter_context(start_workers(template.path, 2))
        return self._group

    # --- one run ------------------------------------------------------------------------------------------------------

    def run(
        self, row, number, kinds=None, change=lambda curator: None, curator_class=Curator, adapters=None, worker=None
    ):
        """All answers of a row.

        kinds: of the grammars, where they are not the row's; None leaves a stream out. change: of the curator before
        the first request. adapters: in the place of the workspace's. worker: what rank 1 does, in a thread.
        """
        kinds = kinds or kinds_of(row)
        used = [kind for kind in kinds if kind is not None]
        with ExitStack() as stack:
            self._own_state(stack)
            total = self._total(row, used)
            charges = {} if row["release"] == "dp" else {"release": row["release"], "charge": row["charge"]}
            exhausted = {"on_exhausted": row["budget"]} if row["budget"] in ("public", "refuse") else {}
            workspace = self.workspace(row, per_token=PER_TOKEN, total=total, **charges, **exhausted)
            recorder = Recorder(self.engine(row, workspace, stack, adapters, worker))
            with self.opened(row, workspace, recorder, number, curator_class) as decoder:
                change(decoder)
                streams, num_refused = submitted(decoder, requests_of(decoder, row, number, kinds))
                for _ in range(1000):
                    if not decoder.num_active:
                        break
                    decoder.step()
                assert all(stream.finish_reason for stream in streams)
        budget = None if row["release"] == "dp" else round(total * 2**60)
        run = Run(row, workspace, recorder, streams, used[: len(streams)], num_refused, budget)
        run.rows = [recorder.rows_of(stream)[: len(stream.tokens)] for stream in streams]
        if row["release"] != "dp":
            report = verify(workspace.ledger_address)
            assert report.intact
            run.state = report.contents.state
        return run

    def opened(self, row, workspace, engine, seed, curator_class):
        """A decoder with this engine; secret and noise follow from the seed."""
        if row["release"] == "dp":
            return DpDecoder.open(workspace, engine=engine, tokenizer=self.tokenizer)
        curator = curator_class.open(workspace, engine=engine, tokenizer=self.tokenizer)
        set_secret(curator, seed % WORLDS)
        curator._releaser._noise = SeededNoise(seed)
        return curator

    def _own_state(self, stack):
        """Copies of one workspace are many deployments over the same records; none is to hear of the others."""
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PACLM_STATE_DIR", str(self._folder / f"state-{self._num_copies}"))

    def _total(self, row, kinds):
        """Under `refuse` what all streams but the last can cost, or the only one."""
        paid = [MOST_TOKENS[kind] for kind in kinds]
        tokens = {"public": NUM_PAID, "refuse": sum(paid[:-1]) or paid[0]}.get(row["budget"], 100)
        return tokens * PER_TOKEN


def set_secret(curator, world):
    curator._releaser._secret = Secret(Redacted(world), WORLDS)


def kinds_of(row):
    """Of the grammars side by side: the row's own and those that follow it."""
    kinds = FEATURES["grammar"]
    first = kinds.index(row["grammar"])
    return [kinds[(first + i) % len(kinds)] for i in range(row["streams"])]


def requests_of(decoder, row, number, kinds):
    """The first has the decoder of the row, every second one the other."""
    return [
        decoder.request(
            PROMPTS[(number + i) % len(PROMPTS)],
            MOST_TOKENS[kind],
            greedy=(row["decoder"] == "greedy") == (i % 2 == 0),
            stop=STOP if row["stop"] else (),
            coins_seed=100 * number + i,
            tag=f"key {i % 2}",
            num_logprobs=row["logprobs"],
            grammar=GRAMMARS[kind],
        )
        for i, kind in enumerate(kinds)
        if kind is not None
    ]


def submitted(decoder, requests):
    """The streams, and how many requests were refused because the budget does not cover them."""
    streams = []
    for request in requests:
        with suppress(BudgetExceeded):
            streams.append(decoder.submit(request))
    return streams, len(requests) - len(streams)


def units_of(row):
    """What a private token costs at most."""
    return units_up(PER_TOKEN) if row["release"] in ("gaussian", "channel") else 0
