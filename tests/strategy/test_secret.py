"""The secret of a strategy's own DHT: as a keyword, in an invite, from the environment, and not shown."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import LOOPBACK, PacedModel, TinyModel, loader, trainer

import hivenb
from hivenb.engine.network.access.tokens import Admin, InviteKey, Secret
from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from hivenb.errors import NotInvitedError
from hivenb.strategy import HivemindStrategy, checks
from hivenb.swarm.invite import encode_invite, read_invite

SECRET, OTHER = Secret.random(), Secret.random()
PEER = "/ip4/127.0.0.1/tcp/31337/p2p/12D3KooWNTpTGNxFtZXDLUk9SpcvF6Qv1bfSVFnZfAhkuBbHbRBq"
KEY = Admin(SECRET).new_invite()
INVITE = encode_invite([PEER], KEY, "digits")


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INITIAL_PEERS", "PL_INITIAL_PEERS", "HIVENB_SECRET"):
        monkeypatch.delenv(name, raising=False)


def secret_of(**keywords: Any) -> Secret | InviteKey | None:
    secret: Secret | InviteKey | None = HivemindStrategy(8, **keywords)._dht_kwargs["secret"]
    return secret


def test_without_one_it_is_open_as_documented() -> None:
    assert secret_of() is None
    assert secret_of(initial_peers=PEER) is None


def test_where_it_may_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert secret_of(secret=SECRET.reveal()) == secret_of(secret=SECRET) == SECRET
    assert secret_of(initial_peers=INVITE) == KEY
    assert secret_of(initial_peers=INVITE, secret=SECRET) == SECRET, "which can do more"
    monkeypatch.setenv("HIVENB_SECRET", OTHER.reveal())
    assert secret_of(initial_peers=INVITE) == KEY, "an invite is to its own swarm"
    monkeypatch.delenv("HIVENB_SECRET")
    monkeypatch.setenv("INITIAL_PEERS", INVITE)
    assert secret_of() == KEY
    monkeypatch.delenv("INITIAL_PEERS")
    monkeypatch.setenv("HIVENB_SECRET", f" {SECRET.reveal()}\n")
    assert secret_of() == secret_of(initial_peers=PEER) == SECRET
    assert secret_of(secret=OTHER) == OTHER, "what is said in the script comes first"


def test_an_invite_names_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HivemindStrategy(8, initial_peers=INVITE).options.run_id == "digits"
    assert HivemindStrategy(8, "letters", initial_peers=INVITE).options.run_id == "letters"
    monkeypatch.setenv("INITIAL_PEERS", INVITE)
    assert HivemindStrategy(8).options.run_id == "digits"


@pytest.mark.parametrize(
    ("keywords", "environment", "words"),
    [
        ({"secret": "guess me"}, "", "at least 32 characters"),
        ({"secret": OTHER, "initial_peers": INVITE}, "", "not that of the invite"),
        ({}, "guess me", "the environment variable HIVENB_SECRET: a secret has at least 32"),
    ],
)
def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch, keywords: Any, environment: str, words: str) -> None:
    monkeypatch.setenv("HIVENB_SECRET", environment)
    with pytest.raises(MisconfigurationException, match=words) as caught:
        HivemindStrategy(8, **keywords)
    assert not any(text in str(caught.value) for text in ("guess me", SECRET.reveal(), OTHER.reveal()))


def test_a_dht_that_runs_has_its_own(swarm: hivenb.Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVENB_SECRET", "guess me")
    assert HivemindStrategy(8, dht=swarm.dht).dht is swarm.dht
    with pytest.raises(MisconfigurationException, match=r"secret would have no effect"):
        HivemindStrategy(8, dht=swarm.dht, secret=SECRET)


@pytest.mark.process
def test_a_script_without_the_secret_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("hivenb.strategy.strategy.rank_zero_info", told.append)
    first = HivemindStrategy(8, secret=SECRET, **LOOPBACK)
    try:
        (how,) = [str(address) for address in first.dht.get_visible_maddrs()][:1]
        assert f"INITIAL_PEERS={how}" in told[0]
        assert "the same HIVENB_SECRET" in told[0]
        assert SECRET.reveal() not in told[0]
        with pytest.raises(NotInvitedError, match="the swarm is private, and no secret was given"):
            trainer(HivemindStrategy(8, initial_peers=how, **LOOPBACK), max_epochs=1).fit(TinyModel(), loader())
    finally:
        first.dht.shutdown()
    assert "HIVENB_SECRET" not in checks.how_to_join(_Gone(), None)  # type: ignore[arg-type]


class _Gone:
    def get_visible_maddrs(self, latest: bool) -> list[str]:
        return [PEER]


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_script_trains_with_a_notebook_by_its_invite(swarm: hivenb.Swarm) -> None:
    run = hivenb.TrainingRun(
        PacedModel(),
        loader(),
        swarm=swarm,
        options=hivenb.Options(target_batch_size=64, run_id="scripted"),
        accelerator="cpu",
    )
    run.start()
    assert read_invite(swarm.invite).key is not None
    strategy = HivemindStrategy(64, initial_peers=swarm.invite, **LOOPBACK)
    script, groups = trainer(strategy, max_epochs=-1, max_steps=2000), []

    def note(report: EpochReport) -> None:
        groups.append(report.group_size)
        script.should_stop = groups.count(2) > 2

    strategy.on_epoch = note
    try:
        script.fit(PacedModel(), loader())
    finally:
        run.stop()
    assert 2 in groups
