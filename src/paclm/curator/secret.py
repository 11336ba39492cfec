"""The secret: which world is realized. Drawn once; read only to release a token and to seal it on disk.

The belief is redacted and sealed in the same way: it is what an adversary who saw every token would believe about the
secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NoReturn, final

import numpy as np

from paclm.curator.master_key import MasterKeys
from paclm.curator.redacted import Redacted, redact_errors
from paclm.errors import CuratorError, RandomnessMisuse, UnsoundState
from paclm.privacy.belief import FloatArray, IntArray, check_belief, check_num_worlds, uniform_belief
from paclm.privacy.leak import leak_by_entropy
from paclm.privacy.randomness import NoiseSource
from paclm.privacy.releases import Rule, unreadable_secret

FORMAT = 1


@final
class Secret:
    """The realized world among m. The index never leaves this object."""

    __slots__ = ("__world", "num_worlds")

    def __init__(self, world: Redacted[int], num_worlds: int) -> None:
        self.__world = world
        self.num_worlds = num_worlds

    @classmethod
    def draw(cls, num_worlds: int) -> Secret:
        """Draw uniformly, from the operating system's generator."""
        return cls(Redacted(secrets.randbelow(check_num_worlds(num_worlds))), num_worlds)

    @redact_errors
    def release(
        self, rule: Rule, votes: Iterable[IntArray], belief: Redacted[FloatArray], per_token: float, noise: NoiseSource
    ) -> tuple[Redacted[list[int]], Redacted[FloatArray]]:
        """Release one token on each row of votes (m,), in order, each against the belief that the last one left.

        Noise and noised votes exist in here only. A belief that did not change comes back as the same object.
        """
        if not noise.is_private:
            raise RandomnessMisuse("A private release needs paclm.Noise().")
        before = now = check_belief(belief.reveal(), self.num_worlds)
        # A rule that declares that it never reads the secret is charged nothing: it gets one that cannot be read.
        world = self.__world.reveal() if rule.reads_secret else unreadable_secret(rule.name)
        tokens = []
        for row in votes:
            release = rule.release(row, now, world, per_token, noise)
            if release.belief is not now:
                now = check_belief(release.belief, self.num_worlds)
            tokens.append(release.token)
        return Redacted(tokens), belief if now is before else Redacted(now)

    @redact_errors
    def sealed(self, keys: MasterKeys, digest: str, ledger: str) -> bytes:
        """The secret encrypted, bound to its worlds and to the ledger that charges for it."""
        return keys.seal(self.__world.reveal().to_bytes(8, "big"), _secret_subject(digest, ledger, self.num_worlds))

    @classmethod
    def unsealed(cls, sealed: bytes, keys: MasterKeys, digest: str, ledger: str, num_worlds: int) -> Secret:
        """The secret that `sealed` encrypted."""
        world = keys.unseal(sealed, _secret_subject(digest, ledger, num_worlds))
        if world is None or not _is_world(world, num_worlds):
            raise CuratorError(
                "The sealed secret cannot be opened: it was changed, or belongs to another workspace or ledger. "
                "Restore it from a backup; without it nothing can be served."
            )
        return cls(Redacted(int.from_bytes(world.reveal(), "big")), num_worlds)

    @redact_errors
    def is_same(self, other: Secret) -> bool:
        """Whether both name the same world: two copies of one secret. Never shown to anyone."""
        return self.num_worlds == other.num_worlds and self.__world.reveal() == other.__world.reveal()

    def __repr__(self) -> str:
        return f"<Secret among {self.num_worlds} worlds>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsoundState("The secret cannot be pickled or copied: it stays in the process that holds it.")


def _is_world(world: Redacted[bytes], num_worlds: int) -> bool:
    return len(world.reveal()) == 8 and int.from_bytes(world.reveal(), "big") < num_worlds


def _secret_subject(digest: str, ledger: str, num_worlds: int) -> bytes:
    return f"paclm secret {FORMAT}; worlds {num_worlds}; workspace {digest}; ledger {ledger}".encode()


def prior_belief(num_worlds: int) -> Redacted[FloatArray]:
    """The belief before the first token."""
    return Redacted(uniform_belief(num_worlds))


@redact_errors
def seal_belief(belief: Redacted[FloatArray], keys: MasterKeys, digest: str) -> bytes:
    """The belief encrypted bit for bit. The ledger binds it to its row: every row signs the hash of what it stores."""
    return keys.seal(belief.reveal().astype("<f8", copy=False).tobytes(), _belief_subject(digest))


def unseal_belief(sealed: bytes, keys: MasterKeys, digest: str, num_worlds: int) -> Redacted[FloatArray] | None:
    """The same belief bit for bit; None if it was sealed with another key or for other worlds."""
    content = keys.unseal(sealed, _belief_subject(digest))
    if content is None or len(content.reveal()) != 8 * num_worlds:
        return None
    return _checked_belief(content, num_worlds)


@redact_errors
def _checked_belief(content: Redacted[bytes], num_worlds: int) -> Redacted[FloatArray]:
    return Redacted(check_belief(np.frombuffer(content.reveal(), dtype="<f8").astype(np.float64), num_worlds))


def _belief_subject(digest: str) -> bytes:
    return f"paclm belief {FORMAT}; workspace {digest}".encode()


@redact_errors
def leak_to_three_digits(belief: Redacted[FloatArray]) -> float:
    """log m − H(P) of one belief: the estimated leak to an observer of everything. More digits would leak more."""
    return float(f"{max(0.0, leak_by_entropy(belief.reveal()[None]).mean):.3g}")
