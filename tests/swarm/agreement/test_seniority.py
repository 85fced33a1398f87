"""Whom a peer believes: by when it first saw them. Declarations of real keys, and proofs of real identities."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hivemind.p2p import PeerID
from set_clock import Clock

from hivenb.engine.network.access.identity import new_identity, prove
from hivenb.swarm.agreement import seniority as module
from hivenb.swarm.agreement.options_record import Declaration, Plan, label_of
from hivenb.swarm.agreement.seniority import AT_ONCE, MAX_REMEMBERED, SEEN_WITHIN, Seniority

PLAN = Plan(0, ((0, {}),))
OWN, HOST, NEXT, FORGER = b"own", b"host", b"next", b"forger"


def declared(owner: bytes, since: float = 100.0, order: Sequence[bytes] = (), **kwargs: object) -> Declaration:
    return Declaration(owner, "peer", since, PLAN, tuple(map(label_of, order)), **kwargs)  # type: ignore[arg-type]


def owners(declarations: Sequence[Declaration]) -> list[bytes]:
    return [one.owner for one in declarations]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module.time, "monotonic", made)
    return made


def founder(since: float = 100.0) -> Seniority:
    made = Seniority(OWN)
    made.come(since)
    return made


class TestWhoCameBefore:
    def test_whoever_comes_later_is_junior_whatever_it_claims(self) -> None:
        seniority, forged = founder(), declared(FORGER, since=0.0)
        seniority.meet([forged])
        assert seniority.elders([forged]) == []
        assert owners(seniority.juniors([forged])) == [FORGER]

    def test_one_that_joins_ranks_after_all_who_are_there_and_before_all_who_come(self) -> None:
        host, second = declared(HOST, 50.0, [HOST, NEXT]), declared(NEXT, 60.0, [HOST, NEXT])
        seniority = Seniority(OWN)
        seniority.meet([second, host])
        seniority.come(100.0)
        seniority.meet([host, second, declared(FORGER, 0.0)])
        assert owners(seniority.elders([declared(FORGER, 0.0), second, host])) == [HOST, NEXT]
        assert owners(seniority.elders([declared(FORGER, 0.0), second])) == [NEXT], "the next one, if the host leaves"
        assert seniority.labels([host, second]) == tuple(map(label_of, (HOST, NEXT, OWN)))

    def test_one_that_returns_has_its_old_place(self) -> None:
        seniority, other = founder(), declared(NEXT, 150.0)
        seniority.meet([other])
        seniority.come(900.0)
        assert seniority.since == 100.0
        assert seniority.elders([other]) == []

    def test_two_that_came_at_once_agree_by_what_they_claim(self) -> None:
        a, b = Seniority(b"a"), Seniority(b"b")
        a.come(100.0)
        b.come(101.0)
        of_a, of_b = declared(b"a", 100.0), declared(b"b", 101.0)
        a.meet([of_b])
        b.meet([of_a])
        assert a.elders([of_b]) == []
        assert owners(b.elders([of_a])) == [b"a"]

    def test_one_that_claims_to_have_come_long_before_an_empty_swarm_did_not(self) -> None:
        seniority, early = founder(100.0), declared(FORGER, 99.0 - AT_ONCE)
        seniority.meet([early])
        assert seniority.elders([early]) == []

    def test_nobody_takes_the_founders_place_by_claiming_to_have_come_at_once(self, clock: Clock) -> None:
        """What the founder declares says when it came, to everybody."""
        seniority, late = founder(100.0), declared(FORGER, 99.0)
        clock.now += SEEN_WITHIN + 1
        seniority.meet([late])
        assert seniority.elders([late]) == []

    def test_whoever_joined_a_swarm_yields_to_nobody_that_claims_to_have_come_at_once(self) -> None:
        host, seniority = declared(HOST, 50.0), Seniority(OWN)
        seniority.meet([host])
        seniority.come(100.0)
        seniority.meet([declared(FORGER, 99.0)])
        assert owners(seniority.elders([host, declared(FORGER, 99.0)])) == [HOST]

    def test_one_that_found_others_without_a_word_of_them_takes_the_first_for_its_elders(self) -> None:
        seniority = founder(100.0)
        seniority.is_unsure = True
        seniority.meet([declared(HOST, 10.0)])
        assert owners(seniority.elders([declared(HOST, 10.0)])) == [HOST]

    def test_two_that_are_unsure_do_not_take_each_other_for_the_host(self) -> None:
        a, b = Seniority(b"a"), Seniority(b"b")
        for seniority, since in ((a, 100.0), (b, 100.5)):
            seniority.come(since)
            seniority.is_unsure = True
        of_a, of_b = declared(b"a", 100.0, [b"a"]), declared(b"b", 100.5, [b"b"])
        a.meet([of_b])
        b.meet([of_a])
        assert a.elders([of_b]) == []
        assert owners(b.elders([of_a])) == [b"a"]

    def test_but_not_one_that_has_found_it_there(self) -> None:
        """The others may have been local peers, who declare nothing; then each took the other one for the host."""
        seniority, newcomer = founder(100.0), declared(NEXT, 110.0, [OWN, NEXT])
        seniority.is_unsure = True
        seniority.meet([newcomer])
        assert seniority.elders([newcomer]) == []
        assert owners(seniority.juniors([newcomer])) == [NEXT]


class TestWhomToBelieve:
    def test_a_newcomer_believes_whom_most_of_the_others_follow(self) -> None:
        there = [
            declared(FORGER, 0.0, [FORGER]),
            declared(HOST, 50.0, [HOST, NEXT]),
            declared(NEXT, 60.0, [HOST, NEXT]),
        ]
        seniority = Seniority(OWN)
        seniority.meet(there)
        seniority.come(100.0)
        assert owners(seniority.elders(there)) == [HOST, NEXT, FORGER]

    def test_it_believes_the_peer_from_whose_invite_it_came_more_than_any_number(self) -> None:
        identity = new_identity()
        inviting = peer_of(identity)
        honest = Declaration(
            NEXT, inviting.to_base58(), 60.0, PLAN, tuple(map(label_of, (HOST, NEXT))), prove(identity, NEXT)
        )
        forged = [
            Declaration(b"f%d" % number, inviting.to_base58(), 0.0, PLAN, (label_of(b"f0"),), proof)
            for number, proof in enumerate([b"", b"x" * 64, prove(new_identity(), b"f2"), prove(identity, b"other")])
        ]
        there = [*forged, honest, declared(HOST, 50.0, [HOST])]
        assert [one.is_proven for one in there] == [False] * 4 + [True, False]
        seniority = Seniority(OWN)
        seniority.meet(there, frozenset({inviting.to_base58()}))
        assert owners(seniority.elders(there))[:2] == [HOST, NEXT]

    def test_what_its_elders_say_of_their_elders_counts_and_what_its_juniors_say_does_not(self) -> None:
        second = declared(NEXT, 60.0, [HOST, NEXT])
        seniority = Seniority(OWN)
        seniority.meet([second])
        seniority.come(100.0)
        back, forger = declared(HOST, 50.0, [HOST, NEXT]), declared(FORGER, 0.0, [FORGER, HOST, NEXT, OWN])
        seniority.meet([second, back, forger])
        assert owners(seniority.elders([second, back, forger])) == [HOST, NEXT]

    def test_whoever_is_not_followed_any_more_is_believed_no_more(self) -> None:
        host, second = declared(HOST, 50.0), declared(NEXT, 60.0)
        seniority = Seniority(OWN)
        seniority.meet([host, second])
        seniority.come(100.0)
        seniority.stop_following(HOST)
        assert owners(seniority.elders([host, second])) == [NEXT]
        assert label_of(HOST) not in seniority.labels([host, second])

    def test_a_flood_of_newcomers_takes_nobodys_place(self) -> None:
        host, seniority = declared(HOST, 50.0), Seniority(OWN)
        seniority.meet([host])
        seniority.come(100.0)
        flood = [declared(b"%d" % number, 0.0) for number in range(2 * MAX_REMEMBERED)]
        seniority.meet([*flood, host])
        assert owners(seniority.elders([*flood, host])) == [HOST]
        assert len(seniority.labels([*flood, host])) <= MAX_REMEMBERED


def peer_of(identity: bytes) -> PeerID:
    """The peer that libp2p makes of a private key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from hivemind.proto import crypto_pb2

    data = crypto_pb2.PrivateKey.FromString(identity).data
    raw = Ed25519PrivateKey.from_private_bytes(data[:32]).public_key().public_bytes_raw()
    key = crypto_pb2.PublicKey(key_type=crypto_pb2.KeyType.Ed25519, data=raw).SerializeToString()
    return PeerID(bytes([0, len(key)]) + key)
