"""Who has written a record."""

from __future__ import annotations

from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import get_logger
from hivemind.utils.crypto import RSAPrivateKey

from hivenb.engine.dht.carried_values import BoundedSerializer
from hivenb.engine.dht.identity import can_prove, id_of, is_proven, prove
from hivenb.engine.dht.record_rules import Kind, RunRecords, is_peer_id, why_refused

logger = get_logger(__name__)

#: Before the signature of a peer, which ends a record; 64 bytes follow.
_SIGNED = b"[peer:]"


class SignatureValidator(RSASignatureValidator):
    """``hivemind``'s validator of signatures, which refuses as well what no record of a run is.

    hivemind's node raises at what cannot be read: whoever has asked for its key would never get an answer.

    :param private_key: with which this peer signs what stands under its public key
    :param identity: the peer's own, if it signs what stands under its id
    :param all_sign: whether all peers do so whose ids hold their keys; plain hivemind's do not
    """

    def __init__(self, private_key: RSAPrivateKey | None = None, identity: bytes | None = None, all_sign: bool = False):
        super().__init__(private_key)
        self._identity, self._all_sign = identity, all_sign
        self._own_id = None if identity is None else BoundedSerializer.dumps(id_of(identity))
        self.kinds: dict[bytes, Kind] = {}

    def validate(self, record: DHTRecord) -> bool:
        try:
            reason = why_refused(record, self.strip_value(record), self.kinds.get(record.key))
            if reason is None and not (self._is_of_its_peer(record) and super().validate(record)):
                reason = "its signature is missing or wrong"
        except (ValueError, TypeError, UnsupportedAlgorithm) as e:  # no public key
            reason = repr(e)
        if reason is not None:
            logger.debug(f"A record was refused: {reason}")
        return reason is None

    def sign_value(self, record: DHTRecord) -> bytes:
        if self._identity is not None and record.subkey == self._own_id:
            return record.value + _SIGNED + prove(self._identity, self._serialize_record(record))
        return super().sign_value(record)

    def strip_value(self, record: DHTRecord) -> bytes:
        value = super().strip_value(record)
        return value[: -len(_SIGNED) - 64] if self._is_signed_by_peer(value) else value

    def merge_with(self, other: RecordValidatorBase) -> bool:
        if isinstance(other, RunRecords):
            self.kinds |= other.kinds
            return True
        return super().merge_with(other)

    def _is_of_its_peer(self, record: DHTRecord) -> bool:
        """Whether what stands under a peer's id is signed by it, where all peers do so."""
        if not self._all_sign:
            return True
        subkey: Any = BoundedSerializer.loads(record.subkey) if record.subkey else None
        if not is_peer_id(subkey) or not can_prove(subkey):
            return True
        unsigned = DHTRecord(record.key, record.subkey, self.strip_value(record), record.expiration_time)
        return self._is_signed_by_peer(record.value) and is_proven(
            subkey, self._serialize_record(unsigned), record.value[-64:]
        )

    @staticmethod
    def _is_signed_by_peer(value: bytes) -> bool:
        return value[-len(_SIGNED) - 64 : -64] == _SIGNED
