"""The curator: votes in, tokens out. Nothing leaves before its charge and the belief are durable.

    step:  engine votes for all streams ─► charges, from the votes alone ─► releases, one after another, each against
           the belief the last one left ─► the engine begins the next step ─► one durable commit ─► pieces of text are
           handed out, finished streams end

The next step is computed while this one is committed and handed out. Until the commit its tokens are known to the
engine alone. A stream that ends with a step in flight is dropped from it: its votes are neither priced nor released.

If anything in a step fails, the curator stops for good: memory may then be ahead of the ledger, and only reopening
finds out what was committed. What was released is charged even if the launch that follows fails: whether it does may
depend on the token. Everything that can fail comes before the first piece is handed out, so a step is handed
out as a whole or not at all; only an interrupt in the middle of handing out can cut it short.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from paclm.config import MechanismConfig, ReleaseName
from paclm.curator.custody import Custody, named_witness, open_custody
from paclm.curator.decoder import Decoder
from paclm.curator.preflight import cautions, deployment_cautions, load_models, training_cautions
from paclm.curator.promises import claim_half, note_releases, refuse_half
from paclm.curator.redacted import Redacted, redact_errors
from paclm.curator.secret import Secret, leak_to_three_digits
from paclm.curator.streams import BudgetFigures, Generation, Mark, Piece, Request, Stream, Tokenizer, UsageFigures
from paclm.curator.vote_source import VoteSource
from paclm.errors import BudgetExceeded, InvalidInput, LedgerError, UnsoundState
from paclm.ledger.events import Usage
from paclm.privacy.accounting import Account, charge_units, nats_up
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.randomness import Noise
from paclm.privacy.releases import rule_named
from paclm.worlds.workspace import Workspace

if TYPE_CHECKING:  # torch is loaded with the models, not on import
    from paclm.engine.workers import WorkerGroup


class Curator(Decoder[Generation]):
    """Single writer over one secret. Open it with `Curator.open`, use it as a context manager."""

    def __init__(
        self, custody: Custody, engine: VoteSource, tokenizer: Tokenizer, more_cautions: Sequence[str] = ()
    ) -> None:
        self.config = custody.ledger.settings
        super().__init__(engine, tokenizer, self.config)
        self._custody = custody
        self._more_cautions = more_cautions
        self._releaser = Releaser(custody.secret, self.config)
        self._note_releases: Callable[[], None] = lambda: None

    @classmethod
    def open(
        cls,
        workspace: Workspace | str | Path,
        *,
        engine: VoteSource | None = None,
        tokenizer: Tokenizer | None = None,
        witness: str | Path | None = None,
        mix_promises: bool = False,
        take_over: bool = False,
        workers: WorkerGroup | None = None,
        release: ReleaseName | None = None,
    ) -> Curator:
        """Take the lock, restore account and belief, load the models and check that they are deterministic.

        The workspace is read again from its path; base model and adapters are hashed in full, under the lock, right
        before they are loaded. `engine`: one that is loaded already; the caller vouches that it has these worlds.
        `witness`: a file on another disk, or a database on another server (postgresql://…), that records how far the
        ledger got; else PACLM_WITNESS.
        `mix_promises`: serve also where the promise `corpus` was served; nothing is then promised about the corpus.
        `take_over`: take a ledger in a database from a holder that is alive.
        `workers`: other processes that share the worlds (`paclm.engine.launch.start_workers`); the caller closes them.
        `release`: a release rule to use instead of the one in [mechanism], until it is closed.
        """
        path = workspace.path if isinstance(workspace, Workspace) else workspace
        opened = Workspace.open(path)
        if not mix_promises:
            refuse_half(opened)  # also here: a refused workspace gets no key, secret or ledger
        custody = open_custody(opened, named_witness(witness), take_over=take_over, release=release)
        try:
            ledger = custody.ledger
            mixed = claim_half(opened, mix_promises=mix_promises, epoch=ledger.store.epoch)
            more = [
                *custody.cautions,
                *mixed,
                *training_cautions(opened),
                *deployment_cautions(opened, ledger.ledger_id, ledger.state.tokens),
            ]
            curator = cls(custody, *load_models(path, custody.ledger, engine, tokenizer, workers), more)
            curator._note_releases = partial(note_releases, opened)
            for sentence in curator.cautions:
                warnings.warn(sentence, stacklevel=2)
            return curator
        except BaseException:
            custody.ledger.close()
            raise

    def step(self) -> list[tuple[Stream, Piece]]:
        """Release the next token of every stream whose prompt is read: one engine step, one commit.

        Empty when no stream is active, and when none is ready yet: then a chunk of prompts was read.
        """
        with self._guard.exclusive(), self._stops_on_failure():
            if not self._has_launched():
                return []
            coins = self._draw_coins()  # of the next step, while this one is computed
            streams, votes, public = self._votes()
            charges = self._releaser.charges(votes, self.account)
            tokens, belief = self._releaser.release(votes, public, charges, self._custody.begin())
            try:
                self._continue(streams, tokens, coins)
            finally:  # whether it fails may depend on the tokens: they are charged all the same
                self._custody.commit(usage_by_tag([stream.request.tag for stream in streams], charges), belief)
            return self._deliver(streams, charges, tokens.reveal())

    def _votes(self) -> tuple[list[Stream], IntArray, IntArray]:
        """The streams in flight that still run, all worlds' votes on them (n, m), and the public model's (n,)."""
        in_flight, ballot = self._collect()
        votes = self._releaser.checked(ballot.votes, ballot.public, len(in_flight), self._engine.vocabulary)
        rows = [row for row, stream in enumerate(in_flight) if stream.finish_reason is None]
        return [in_flight[row] for row in rows], votes[rows], ballot.public[rows]

    def result(self, stream: Stream) -> Generation:
        """A finished stream as a whole."""
        if stream.finish_reason is None:
            raise InvalidInput("The stream is still running; call step() until it has a finish_reason.")
        num_public = stream.marks.count("public")
        return Generation(
            text=stream.text,
            tokens=tuple(stream.tokens),
            marks=tuple(stream.marks),
            finish_reason=stream.finish_reason,
            private_tokens=len(stream.tokens) - num_public,
            public_tokens=num_public,
            charged_nats=nats_up(stream.charged_units),
            **self.figures(),
        )

    # --- state --------------------------------------------------------------------------------------------------------

    def figures(self) -> BudgetFigures:
        """The state of the budget, in the names of the command line's JSON. Bounds are at the committed total."""
        account, bounds = self.account, self._custody.ledger.bounds
        return BudgetFigures(
            spent_nats=account.spent_nats,
            total_nats=account.total_nats,
            remaining_tokens=account.remaining_tokens(self.config.per_token),
            mia_bound=bounds.mia,
            world_id_bound=bounds.world_id,
        )

    @property
    def account(self) -> Account:
        """The budget after the last commit."""
        return self._custody.ledger.account

    @property
    def committed_nats(self) -> float:
        """The largest total that was ever in force: what all bounds are at."""
        return nats_up(self._custody.ledger.state.committed_units)

    @property
    def ledger_id(self) -> str:
        """Of the ledger that charges are in: also after it was moved or its key rotated."""
        return self._custody.ledger.ledger_id

    @property
    def cautions(self) -> list[str]:
        """Warnings for the owner about the committed total and the settings."""
        return [*cautions(self.committed_nats), *self._more_cautions]

    @property
    def has_witness(self) -> bool:
        """Whether a second file records how far the ledger got, so that a rollback is detected."""
        return self._custody.ledger.state.witness is not None

    @property
    def epoch(self) -> int | None:
        """What writes beside a ledger in a database must name; None where the ledger is a file."""
        return self._custody.ledger.store.epoch

    def when_lost(self, call: Callable[[LedgerError], None]) -> None:
        """Call this, from another thread and once, if another process takes the ledger over, or it is out of reach."""
        self._custody.ledger.store.when_lost(call)

    def usage(self) -> UsageFigures:
        """Usage by tag and by hour, from the ledger."""
        return UsageFigures(self._custody.ledger.by_key(), self._custody.ledger.by_hour())

    def leak_estimate(self) -> float:
        """Estimated leak in nats, to three digits; for the owner only."""
        return leak_to_three_digits(self._custody.belief)

    @property
    def commit_seconds(self) -> float:
        """Duration of the last commit."""
        return self._custody.commit_seconds

    @property
    def num_worlds(self) -> int:
        """m."""
        return self._custody.secret.num_worlds

    @property
    def worst_price(self) -> int:
        """The highest price of one private token, in units."""
        return self._releaser.price(is_dissent=True)

    @property
    def reserved_units(self) -> int:
        """The worst case of running, waiting and held streams; in memory only."""
        return sum(stream.reserved_units for stream in (*self._running, *self._waiting, *self._held))

    # --- reservations and the end -------------------------------------------------------------------------------------

    def _new_streams(self, requests: Sequence[Request]) -> list[Stream]:
        """Streams whose worst case, where one is reserved, fits into the budget beside all other reservations."""
        self._refuse_if_stopped()
        if any(request.num_logprobs is not None for request in requests):
            raise InvalidInput(
                "There are no log-probabilities under the promise half: votes never become probabilities. Leave "
                "num_logprobs out."
            )
        worst = self.worst_price if self.config.on_exhausted == "refuse" else 0
        streams = [Stream(request, self.tokenizer, worst) for request in requests]
        units, held, account = sum(stream.reserved_units for stream in streams), self.reserved_units, self.account
        if not account.affords(held + units):
            free = max(0, account.remaining_units - held)
            fewer = f"Ask for at most {free // worst:,} tokens, extend" if free >= worst else "Extend"
            raise BudgetExceeded(
                f"The request may cost {nats_up(units):.6g} nats ({units // worst:,} tokens), but only "
                f"{nats_up(free):.6g} are free: of {account.total_nats:.6g}, {account.spent_nats:.6g} are spent and "
                f"{nats_up(held):.6g} reserved for other requests. {fewer} the total with `paclm ledger extend`, or "
                'set on_exhausted = "public" in [mechanism].'
            )
        return streams

    def _close(self) -> None:
        """Release the ledger's lock, too."""
        try:
            super()._close()
            self._note_releases()
        finally:
            self._custody.ledger.close()

    def __repr__(self) -> str:
        return f"<Curator over {self._custody.secret.num_worlds} worlds, {self.num_active} streams>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsoundState("A curator cannot be pickled or copied: one secret has one holder.")


class Charge(NamedTuple):
    """What one token costs. Follows from the votes alone."""

    mark: Mark
    units: int


class Releaser:
    """Prices votes and releases tokens with the configured mechanism."""

    def __init__(self, secret: Secret, config: MechanismConfig) -> None:
        self._secret = secret
        self._config = config
        self._rule = rule_named(config.release)
        self._noise = Noise()

    def price(self, *, is_dissent: bool) -> int:
        """Units that a private token costs."""
        return charge_units(
            self._config.charge, self._config.per_token, reads_secret=self._rule.reads_secret, is_dissent=is_dissent
        )

    def checked(self, votes: IntArray, public: IntArray, num_streams: int, vocabulary: int) -> IntArray:
        """A copy of the votes (n, m): what is priced is what is released, whatever the engine does to its own array.

        Nothing that follows may fail for some of these tokens and not for others.
        """
        own = np.array(votes)
        if own.shape != (num_streams, self._secret.num_worlds) or own.dtype.kind not in "iu":
            raise UnsoundState(f"The engine returned votes {own.dtype} {own.shape}. Nothing was released.")
        for tokens in (own, np.asarray(public)):
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
                raise UnsoundState("The engine returned votes that are no token ids. Nothing was released.")
        return own

    def charges(self, votes: IntArray, account: Account) -> list[Charge]:
        """The charge of each row of checked votes (n, m), in order, as far as the account affords them."""
        disputed = Charge("disputed", self.price(is_dissent=True))
        agreed = Charge("agreed", self.price(is_dissent=False))
        charges = [disputed if is_dissent else agreed for is_dissent in (votes != votes[:, :1]).any(axis=1).tolist()]
        if account.affords(len(charges) * disputed.units):
            return charges
        return self._within(account, charges, disputed.units)

    def _within(self, account: Account, charges: list[Charge], worst: int) -> list[Charge]:
        """These charges in order, as long as the budget covers dissent; from then on all are the public model's.

        Also those that would cost nothing: or else the marks would show everyone where the worlds dissent.
        """
        covered = []
        for charge in charges:
            if account.affords(worst):
                account = account.charge(charge.units, is_dissent=charge.mark == "disputed")
                covered.append(charge)
            elif self._config.on_exhausted == "refuse":
                raise UnsoundState("The budget ended inside a stream that had reserved its worst case.")
            else:
                covered.append(Charge("public", 0))
        return covered

    def release(
        self, votes: IntArray, public: IntArray, charges: list[Charge], belief: Redacted[FloatArray]
    ) -> tuple[Redacted[list[int]], Redacted[FloatArray]]:
        """One token per row and the belief after the last. Unanimous votes need no release (`lem:singular` iii)."""
        dissent = [row for row, charge in enumerate(charges) if charge.mark == "disputed"]
        released, belief = self._secret.release(self._rule, votes[dissent], belief, self._config.per_token, self._noise)
        return _in_order(charges, votes[:, 0], public, released), belief


@redact_errors
def _in_order(
    charges: list[Charge], agreed: IntArray, public: IntArray, released: Redacted[list[int]]
) -> Redacted[list[int]]:
    dissent = iter(released.reveal())
    rows = zip(charges, agreed.tolist(), public.tolist(), strict=True)
    return Redacted([next(dissent) if mark == "disputed" else p if mark == "public" else a for (mark, _), a, p in rows])


def usage_by_tag(tags: Iterable[str], charges: Iterable[Charge]) -> list[Usage]:
    """The step's entries for the ledger, one per tag."""
    entries: dict[str, Usage] = {}
    for (tag, (mark, units)), n in Counter(zip(tags, charges, strict=True)).items():
        is_private = mark != "public"
        more = Usage(tag, n * is_private, n * (mark == "disputed"), n * (units > 0), n * units, n * (not is_private))
        entries[tag] = entries[tag].plus(more) if tag in entries else more
    return list(entries.values())
