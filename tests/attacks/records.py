"""Attacks by records in the DHT: numbers out of bounds, forged hosts, keys that are taken, and peers that are none."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from attacks.attacked_runs import RUN_ID, happens, make_run, require, rounds_in, stranger, swarms, training
from attacks.case import Attack, Outcome
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import DHTRecord
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from hivenb.engine.network import node, records
from hivenb.engine.network.access.identity import id_of, new_identity
from hivenb.engine.network.record_board import owner_of
from hivenb.engine.progress import failure_detector
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
    with swarms(2) as (first, second), stranger(first, [RSASignatureValidator(key)]) as attacker:
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
    with swarms(3) as (first, second, third), stranger(first, [RSASignatureValidator(key)]) as attacker:
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
    with swarms(2) as (first, second), stranger(first, [RSASignatureValidator(key)]) as attacker:
        shared = {"target_batch_size": 256}
        _declare(attacker, key, seconds=25.0, steps=[[0, shared]])
        with training(make_run(first), run := make_run(second)):
            first_peers_follow = run.not_host_reason
            _declare(attacker, key, seconds=27.0, version=1, steps=[[0, shared], [1, {"target_batch_size": 1}]])
            adopted = happens(lambda: run.options.target_batch_size == 1, 8.0)
        figure = f"with a host of its own ({first_peers_follow is not None}), 256 samples become "
        return Outcome(not adopted, figure + str(run.options.target_batch_size))


# -- keys that are taken ----------------------------------------------------------------------------------------------


def _take_all() -> None:
    node.Protocol.take_over = lambda made: None
    records.why_refused = lambda record, value, kind: None


def _taken_keys() -> Outcome:
    with swarms(2) as (first, second), stranger(first) as attacker:
        founder, member = make_run(first), make_run(second)
        with training(founder, member):
            for averager in ("grad_averager", "state_averager"):
                for key in ("0b", "all_averagers"):
                    expires = get_dht_time() + 3600
                    attacker.store(f"{RUN_ID}_{averager}.{key}", value=1.0, expiration_time=expires)
            rounds = rounds_in(founder, 10.0)
        return Outcome(rounds >= 3, f"{rounds} rounds of two in 10 s")


def _silenced() -> Outcome:
    # one that runs a node of its own answers whoever asks, too: against that, private swarms sign such records
    with swarms(2) as (first, second), stranger(first, client_mode=True) as attacker:
        founder, member = make_run(first), make_run(second)
        with training(founder, member):
            for swarm in (first, second):
                for averager in ("grad_averager", "state_averager"):
                    key, expires = f"{RUN_ID}_{averager}.0b", get_dht_time() + 500
                    attacker.store(key, subkey=swarm.dht.peer_id.to_bytes(), value=False, expiration_time=expires)
            rounds = rounds_in(founder, 10.0)
        return Outcome(rounds >= 3, f"{rounds} rounds of two in 10 s")


# -- peers that are none ----------------------------------------------------------------------------------------------


class _ManyKeys(RSASignatureValidator):
    """Signs with as many keys as it likes."""

    def __init__(self, count: int):
        super().__init__(RSAPrivateKey())
        self.signers = {owner_of(key): RSASignatureValidator(key) for key in (RSAPrivateKey() for _ in range(count))}

    def validate(self, record: DHTRecord) -> bool:
        return True

    def sign_value(self, record: DHTRecord) -> bytes:
        signer = next((one for owner, one in self.signers.items() if owner in record.subkey), None)
        return record.value if signer is None else signer.sign_value(record)


def _count_everybody() -> None:
    failure_detector.MAX_UNREACHED = failure_detector.MOST_FAILURES = failure_detector.FLOOD = 10**9
    _take_all()


def _bogus_peers() -> Outcome:
    signer = _ManyKeys(150)
    # one that runs a node of its own answers with them, too: that costs the others time, but no round waits for them
    with swarms(2) as (first, second), stranger(first, [signer], client_mode=True) as attacker:
        founder, member = make_run(first), make_run(second)
        with training(founder, member):
            ids = {owner: id_of(new_identity()) for owner in signer.signers}
            ended = threading.Event()

            def report() -> None:
                while not ended.wait(2.0):
                    for owner, peer_id in ids.items():
                        told = {"peer_id": peer_id, "epoch": founder.status.epoch, "samples_accumulated": 0}
                        told |= {"samples_per_second": 0.001, "time": get_dht_time(), "client_mode": False}
                        expires = get_dht_time() + 60
                        attacker.store(f"{RUN_ID}_progress", told, expires, subkey=owner, return_future=True)

            reporting = threading.Thread(target=report)
            reporting.start()
            time.sleep(8.0)
            rounds = rounds_in(founder, 10.0)
            ended.set()
            reporting.join()
        return Outcome(rounds >= 16, f"{rounds} rounds of two in 10 s, after 8 s")


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
    Attack(
        "keys-that-are-taken",
        "stores plain values for an hour where peers look for each other and for states",
        _take_all,
        _taken_keys,
    ),
    Attack(
        "peers-that-are-silenced",
        "says in the name of each peer, for minutes, that it looks for no group",
        _take_all,
        _silenced,
    ),
    Attack(
        "peers-that-are-none",
        "reports the progress of 150 peers that do not exist, each under a key of its own",
        _count_everybody,
        _bogus_peers,
    ),
]
