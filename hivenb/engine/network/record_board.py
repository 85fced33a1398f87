"""One key of a run in the DHT as a board: whoever is there pins up short records, and all read what is on it.

A record stands under a subkey. Whoever reaches the DHT can write under a free one. A signed one is a public key, and
``hivemind``'s ``RSASignatureValidator`` lets only the holder of its private key write there.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from typing import Any

import hivemind
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from hivenb.engine.network.untrusted_values import BoundedSerializer
from hivenb.errors import ProcessEndedError, SwarmError

#: Bytes in one record. A larger message into the DHT's pipe can mix with one of another process (POSIX, PIPE_BUF); the
#: other half of it is for the key, the subkey and the answer's address.
RECORD_BYTES = 2048

#: Seconds that the DHT is given to answer; peers on the internet answer within a fraction of that, or not at all.
ANSWER_TIMEOUT = 10.0

#: Seconds for which a record counts after it was written, unless told otherwise.
EXPIRATION = 60.0

Subkey = str | int | bytes

_NO_ANSWER = (TimeoutError, concurrent.futures.TimeoutError)  # one and the same from Python 3.11 on
_OWNER = RSASignatureValidator.PUBLIC_KEY_FORMAT.split(b"_key_")


class RecordBoard:
    """The records under one key of the DHT. Any thread may use it.

    :param dht: a running DHT
    :param key: all who use the same one share a board
    :param expiration: seconds for which a record counts after it was written here
    :param timeout: seconds that the DHT is given to answer
    """

    def __init__(self, dht: hivemind.DHT, key: str, *, expiration: float = EXPIRATION, timeout: float = ANSWER_TIMEOUT):
        self._dht, self._key, self._expiration, self._timeout = dht, key, expiration, timeout

    @property
    def owner(self) -> bytes:
        """The signed subkey of this peer, whose DHT has a ``private_key`` that its validator signs with."""
        return owner_of(self._dht.private_key)

    def read(self) -> dict[Subkey, ValueWithExpiration[Any]]:
        """What is on the board now, by subkeys; a record that was withdrawn is ``None``.

        Values are as somebody has written them: anybody may write to a DHT. What is no board is an empty one.

        :raises SwarmError: if the DHT does not answer in time
        :raises OSError: if the DHT was closed
        """
        try:
            found: Any = self._dht.get(self._key, latest=True, return_future=True).result(self._timeout)
        except _NO_ANSWER as e:
            raise SwarmError(
                f"the DHT did not answer within {self._timeout} s; is its process overloaded or gone?"
            ) from e
        records = found.value if found is not None and isinstance(found.value, dict) else {}
        return {subkey: record for subkey, record in records.items() if isinstance(record, ValueWithExpiration)}

    def write(self, subkey: Subkey, value: Any) -> None:
        """Pin up a record, over what this peer had there before. Does not wait.

        :param subkey: :attr:`owner`, or a free one
        :param value: what msgpack can carry
        :raises SwarmError: if that is too long to travel
        :raises OSError: if the DHT was closed
        """
        length = length_of(value)
        if length > RECORD_BYTES:
            raise SwarmError(
                f"a record of {self._key!r} takes {length} bytes, and {RECORD_BYTES} can travel: write less, or several"
            )
        self._store(subkey, value)

    def withdraw(self, subkey: Subkey, timeout: float) -> None:
        """Take a record of this peer down at once. Without an answer, it expires by itself.

        :param timeout: seconds that this may take
        """
        with contextlib.suppress(*_NO_ANSWER, OSError, ProcessEndedError):
            self._store(subkey, None).result(timeout)

    def _store(self, subkey: Subkey, value: Any) -> Any:
        expires = get_dht_time() + self._expiration
        return self._dht.store(self._key, subkey=subkey, value=value, expiration_time=expires, return_future=True)


def length_of(value: Any) -> int:
    """Bytes that a value takes in a record: its own if it is made of them, and else those in which it travels."""
    return len(value if isinstance(value, bytes) else BoundedSerializer.dumps(value))


def is_owned(subkey: object) -> bool:
    """Whether a subkey is a public key and nothing else, so that only its owner can write there."""
    start, end = _OWNER
    return isinstance(subkey, bytes) and subkey.startswith(start) and subkey.endswith(end) and subkey.count(start) == 1


def owner_of(key: RSAPrivateKey) -> bytes:
    """The subkey that only the holder of a private key can write to."""
    return RSASignatureValidator(key).local_public_key
