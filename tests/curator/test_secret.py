"""The secret and the belief: uniform, sealed, bound to their workspace, and told to nobody."""

import copy
import json
import pickle
import traceback

import numpy as np
import pytest

from paclm.curator.master_key import MasterKeys
from paclm.curator.redacted import Redacted
from paclm.curator.sealed import SealedFile, Sealing
from paclm.curator.secret import Secret, prior_belief, seal_belief, unseal_belief
from paclm.errors import CuratorError, UnsoundState
from paclm.privacy.belief import Release, uniform_belief
from paclm.privacy.randomness import Noise, ResearchNoise
from paclm.privacy.releases import RULES, Rule, rule_named

KEYS, OTHER = MasterKeys.derived(Redacted(bytes(range(32)))), MasterKeys.derived(Redacted(bytes(32)))
WORLDS = 8
VOTES = np.arange(WORLDS)


def realized(secret):
    """Without noise the realized vote itself comes out."""
    tokens, _ = secret.release(rule_named("gaussian"), [VOTES], prior_belief(secret.num_worlds), np.inf, Noise())
    return tokens.reveal()[0]


def test_secrets_are_drawn_from_all_worlds_alike():
    counts = np.bincount([realized(Secret.draw(WORLDS)) for _ in range(4000)], minlength=WORLDS)
    assert counts.min() > 350  # expected 500, standard deviation 21: false alarm below 1e-11
    assert counts.max() < 650


def test_a_sealed_secret_opens_with_its_own_key_workspace_ledger_and_number_of_worlds_only():
    for world in range(WORLDS):
        sealed = Secret(Redacted(world), WORLDS).sealed(KEYS, "digest", "ledger")
        assert realized(Secret.unsealed(sealed, KEYS, "digest", "ledger", WORLDS)) == world
    for keys, digest, ledger, worlds in (
        (OTHER, "digest", "ledger", WORLDS),
        (KEYS, "other", "ledger", WORLDS),
        (KEYS, "digest", "other", WORLDS),
        (KEYS, "digest", "ledger", 2 * WORLDS),
    ):
        with pytest.raises(CuratorError):
            Secret.unsealed(sealed, keys, digest, ledger, worlds)


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_release_is_that_of_the_rule(name, monkeypatch):
    words = bytes(range(64))
    monkeypatch.setattr("os.urandom", lambda size: words[:size])
    tokens, belief = Secret(Redacted(3), WORLDS).release(rule_named(name), [VOTES], prior_belief(WORLDS), 0.1, Noise())
    expected = rule_named(name).release(VOTES, uniform_belief(WORLDS), 3, 0.1, Noise())
    assert tokens.reveal() == [expected.token]
    assert belief.reveal().tobytes() == expected.belief.tobytes()


def test_seeded_noise_is_refused():
    with pytest.raises(UnsoundState, match="RandomnessMisuse"):
        Secret.draw(WORLDS).release(rule_named("gaussian"), [VOTES], prior_belief(WORLDS), 0.1, ResearchNoise(0))


@pytest.mark.parametrize(
    "belief",
    [np.full(WORLDS, -1.0), np.full(WORLDS, np.nan), uniform_belief(WORLDS + 2)],
    ids=["not summing to one", "not a number", "of other worlds"],
)
def test_nothing_is_released_from_an_unsound_belief(belief):
    with pytest.raises(UnsoundState):
        Secret.draw(WORLDS).release(rule_named("gaussian"), [VOTES], Redacted(belief), 0.1, Noise())


def test_a_release_that_leaves_an_unsound_belief_is_refused():
    good = rule_named("gaussian")

    def broken(votes, belief, secret, per_token, noise):
        return good.release(votes, belief, secret, per_token, noise)._replace(belief=belief + 1.0)

    with pytest.raises(UnsoundState):
        Secret.draw(WORLDS).release(Rule("broken", broken, True), [VOTES], prior_belief(WORLDS), 0.1, Noise())


@pytest.mark.parametrize(
    "belief",
    [np.log(np.random.default_rng(0).dirichlet(np.ones(WORLDS))), np.array([0.0] + [-np.inf] * (WORLDS - 1))],
    ids=["any", "worlds ruled out"],
)
def test_a_belief_is_restored_bit_for_bit_with_its_own_key_and_workspace_only(belief):
    sealed = seal_belief(Redacted(belief), KEYS, "digest")
    assert unseal_belief(sealed, KEYS, "digest", WORLDS).reveal().tobytes() == belief.tobytes()
    assert belief.tobytes() not in sealed
    for keys, digest, worlds in ((OTHER, "digest", WORLDS), (KEYS, "other", WORLDS), (KEYS, "digest", WORLDS + 2)):
        assert unseal_belief(sealed, keys, digest, worlds) is None


def test_a_belief_that_did_not_move_stays_in_the_same_box():
    secret, belief = Secret.draw(WORLDS), prior_belief(WORLDS)
    same, other = np.full(WORLDS, 7), VOTES
    assert secret.release(rule_named("gaussian"), [same], belief, 0.1, Noise())[1] is belief
    assert secret.release(rule_named("mixture"), [other, same], belief, 0.1, Noise())[1] is belief
    assert secret.release(rule_named("gaussian"), [other, same], belief, 0.1, Noise())[1] is not belief


def test_the_file_is_private_and_keeps_retired_keys_sealed(tmp_path):
    file, secret = SealedFile(tmp_path), Secret(Redacted(5), WORLDS)
    assert not file.exists()
    assert file.read() == {}
    sealing = Sealing.make(secret, KEYS, "digest", "ledger", retired=[OTHER])
    file.write({KEYS.id: sealing})
    assert file.path.stat().st_mode & 0o777 == 0o600
    found = file.read()[KEYS.id]
    assert realized(Secret.unsealed(found.secret, KEYS, "digest", "ledger", WORLDS)) == 5
    (retired,) = found.retired_keys(KEYS)
    assert (retired.id, retired.mac.reveal()) == (OTHER.id, OTHER.mac.reveal())
    assert retired.unseal(OTHER.seal(b"old", b""), b"") is not None
    assert OTHER.mac.reveal().hex() not in file.path.read_text()
    with pytest.raises(CuratorError):
        found.retired_keys(OTHER)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"format": 2, "sealings": {}}', b'{"format": 1, "sealings": 3}']
)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path, content):
    file = SealedFile(tmp_path)
    file.path.touch(0o600)
    file.path.write_bytes(content)
    with pytest.raises(CuratorError):
        file.read()


def test_a_secret_does_not_show():
    shown = {repr(s) + str(s) + f"{s}" for s in (Secret(Redacted(w), 4096) for w in (0, 4001))}
    assert len(shown) == 1
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy, vars, json.dumps):
        with pytest.raises((UnsoundState, TypeError)):
            attempt(Secret(Redacted(4001), 4096))


def test_a_rule_that_says_it_never_reads_the_secret_cannot_and_releases_nothing():
    def cheat(votes, belief, secret, *_):
        return Release(int(votes[secret]), belief, True)

    secret = Secret(Redacted(3), WORLDS)
    with pytest.raises(UnsoundState):
        secret.release(Rule("cheat", cheat, reads_secret=False), [VOTES], prior_belief(WORLDS), 0.1, Noise())
    tokens, _ = secret.release(Rule("honest", cheat, reads_secret=True), [VOTES], prior_belief(WORLDS), 0.1, Noise())
    assert tokens.reveal() == [3]


def test_an_error_while_two_secrets_are_compared_tells_its_type_only():
    with pytest.raises(UnsoundState, match="AttributeError") as caught:
        Secret(Redacted(3), WORLDS).is_same(object())
    assert "is_same" not in [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
