"""The secret: which world is realized. Drawn once, sealed on disk, used in one method and shown in none.

The belief travels beside it, hidden and sealed in the same way: it says what an adversary who saw everything would
think of the secret, and more.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple, NoReturn, final

import numpy as np

from paclm.curator.master_key import MasterKeys
from paclm.curator.redacted import Redacted, redact_errors
from paclm.errors import CuratorError, RandomnessMisuse, UnsoundState
from paclm.privacy.belief import FloatArray, IntArray, check_belief, check_num_worlds, check_votes, uniform_belief
from paclm.privacy.leak import leak_by_entropy
from paclm.privacy.randomness import NoiseSource
from paclm.privacy.releases import Rule, unreadable_secret

FORMAT = 1


class Released(NamedTuple):
    """One release that is not yet durable: nobody may see its token or its belief."""

    token: Redacted[int]
    belief: Redacted[FloatArray]


@final
class Secret:
    """The realized world among m. The index never leaves this object."""

    __slots__ = ("__world", "num_worlds")

    def __init__(self, world: Redacted[int], num_worlds: int) -> None:
        self.__world = world
        self.num_worlds = num_worlds

    @classmethod
    def draw(cls, num_worlds: int) -> Secret:
        """Every world equally likely, from the operating system's generator."""
        return cls(Redacted(secrets.randbelow(check_num_worlds(num_worlds))), num_worlds)

    @redact_errors
    def release(
        self, rule: Rule, votes: IntArray, belief: Redacted[FloatArray], per_token: float, noise: NoiseSource
    ) -> Released:
        """Release one token on the votes of all worlds, from this belief. Noise and noised votes die in here."""
        if not noise.is_private:
            raise RandomnessMisuse("A private release needs paclm.Noise().")
        before = check_belief(belief.reveal(), self.num_worlds)
        # A rule that says it never reads the secret is charged nothing: it gets one that cannot be read.
        world = self.__world.reveal() if rule.reads_secret else unreadable_secret(rule.name)
        step = rule.release(check_votes(votes), before, world, per_token, noise)
        if step.belief is before:
            return Released(Redacted(step.token), belief)  # the same box: whoever compares boxes knows it did not move
        return Released(Redacted(step.token), Redacted(check_belief(step.belief, self.num_worlds)))

    @redact_errors
    def sealed(self, keys: MasterKeys, digest: str, ledger: str) -> bytes:
        """The secret encrypted, bound to the worlds it chooses from and to the ledger that charges for it."""
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
    """The very same belief again; None if it was sealed with another key or for other worlds."""
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
    """log m − H(P) of one belief: what an observer of everything has learned, by estimate. More digits would tell."""
    return float(f"{max(0.0, leak_by_entropy(belief.reveal()[None]).mean):.3g}")
