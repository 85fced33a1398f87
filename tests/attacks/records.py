"""Attacks by records in the DHT: numbers out of bounds, forged hosts, keys that are taken, and peers that are none."""

from __future__ import annotations

import json
from typing import Any

from attacks.attacked_runs import RUN_ID, happens, make_run, require, stranger, swarms, training
from attacks.case import Attack, Outcome
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from hivenb.engine.dht.record_board import owner_of
from hivenb.run.status import RunState
from hivenb.swarm.agreement import host, options_record, seniority


def _declare(dht: Any, key: RSAPrivateKey, seconds: float = 60.0, **fields: Any) -> None:
    """Write a declaration as the host of the run would."""
    declared = {"peer": dht.peer_id.to_base58(), "since": 0.0, "version": 0, "steps": [[0, {}]], **fields}
    text = json.dumps(declared).replace("Infinity", "1e999").encode()
    dht.store(f"{RUN_ID}_options", subkey=owner_of(key), value=text, expiration_time=get_dht_time() + seconds)


# -- numbers out of bounds --------------------------------------------------------------------------------------------


def _believe_numbers() -> None:
    options_record.whole = lambda value, *bounds: int(value)
    options_record._UNREADABLE = (KeyError, TypeError, ValueError, RecursionError)


def _number_out_of_bounds() -> Outcome:
    key = RSAPrivateKey()
    with swarms(2) as (first, second), stranger(first, key) as attacker:
        run, newcomer = make_run(first), make_run(second)
        with training(run):
            _declare(attacker, key, seconds=25.0, version=float("inf"))
            has_ended = happens(lambda: not run.is_active, 5.0)
            newcomer.start()
            comes = happens(lambda: newcomer.status.state is not RunState.STARTING) and newcomer.is_active
            comes = comes and happens(lambda: len(run.peers()) == 2, 20.0)
            newcomer.stop()
        figure = f"the run {'has failed' if has_ended else 'trains'}, a newcomer {'comes' if comes else 'fails'}"
        return Outcome(comes and not has_ended, figure)


# -- forged hosts -----------------------------------------------------------------------------------------------------


def _believe_claims() -> None:
    def elders(self: seniority.Seniority, declarations: Any) -> list[Any]:
        own = (self.since or float("inf"), self._own)
        return sorted((one for one in declarations if one.rank < own), key=lambda one: one.rank)

    seniority.Seniority.elders = elders


def _forged_host() -> Outcome:
    key, forged = RSAPrivateKey(), 64
    with swarms(3) as (first, second, third), stranger(first, key) as attacker:
        founder, member = make_run(first), make_run(second)
        newcomer = make_run(third)
        with training(founder, member):
            shared = {"target_batch_size": forged}
            _declare(attacker, key, seconds=25.0, version=9, steps=[[0, shared]])
            runs = (founder, member, newcomer)
            adopted = happens(lambda: forged in [run.options.target_batch_size for run in runs], 6.0)
            newcomer.start()
            require(lambda: len(founder.peers()) == 3)
            sizes = [run.options.target_batch_size for run in runs]
            newcomer.stop()
        return Outcome(not adopted and forged not in sizes, f"batch sizes of 256 become {sizes}")


def _follow_anywhere() -> None:
    host.too_large_a_change = lambda before, after: None


def _mad_host() -> Outcome:
    key = RSAPrivateKey()
    with swarms(2) as (first, second), stranger(first, key) as attacker:
        shared = {"target_batch_size": 256}
        _declare(attacker, key, seconds=25.0, steps=[[0, shared]])
        with training(make_run(first), run := make_run(second)):
            first_peers_follow = run.why_not_host
            _declare(attacker, key, seconds=27.0, version=1, steps=[[0, shared], [1, {"target_batch_size": 1}]])
            adopted = happens(lambda: run.options.target_batch_size == 1, 8.0)
        figure = f"with a host of its own ({first_peers_follow is not None}), 256 samples become "
        return Outcome(not adopted, figure + str(run.options.target_batch_size))


ATTACKS = [
    Attack(
        "a-number-out-of-bounds",
        "declares a version of 1e999 as the host of a run, at which int() raises",
        _believe_numbers,
        _number_out_of_bounds,
    ),
    Attack(
        "a-forged-host",
        "claims to be there since 1970, and so to be the host, which decides on another batch size",
        _believe_claims,
        _forged_host,
    ),
    Attack(
        "a-host-that-goes-mad",
        "came first, and then decides on epochs of one sample instead of 256",
        _follow_anywhere,
        _mad_host,
    ),
]
