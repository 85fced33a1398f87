"""What the line for messages says, and until when: no message outlives what it says."""

from __future__ import annotations

import time
from dataclasses import dataclass

#: Seconds for which a remark stays that nothing else ends.
KEPT = 20.0


@dataclass(frozen=True)
class Message:
    """Something that was said.

    :param text: what
    :param is_trouble: whether something went wrong
    :param at: when, in seconds of :func:`time.monotonic`
    :param state: of the run at that moment
    """

    text: str
    is_trouble: bool
    at: float
    state: str


class Messages:
    """The newest message. What a person does next ends it, as does another state of the run. For one thread at a time.

    A remark ends by itself after :data:`KEPT` seconds, once nothing is pending.
    """

    def __init__(self) -> None:
        self._message: Message | None = None
        self._refused: Exception | None = None

    def say(self, text: str, state: str, *, is_trouble: bool = False) -> None:
        """Say something in place of what was said last; nothing when empty.

        :param state: of the run
        """
        self._message = Message(text, is_trouble, time.monotonic(), state) if text else None

    def act(self, refused: Exception | None) -> None:
        """A person does something: what was said before is over.

        :param refused: why the options that were asked for last could not be put in force; it has been read by now
        """
        self._message, self._refused = None, refused

    def trouble(self, state: str, refused: Exception | None) -> str:
        """What has gone wrong, in words; empty for nothing.

        :param state: of the run now
        :param refused: why the options that were asked for last could not be put in force, if they could not
        """
        self._forget(state)
        found = [self._message.text] if self._message is not None and self._message.is_trouble else []
        if refused is not None and refused is not self._refused:
            found.append(f"{type(refused).__name__}: {refused}")
        return "\n".join(found)

    def remark(self, state: str, is_pending: bool) -> str:
        """What else there is to say; empty for nothing.

        :param state: of the run now
        :param is_pending: whether something that was asked for is not done yet
        """
        self._forget(state)
        message = self._message
        if message is None or message.is_trouble:
            return ""
        if not is_pending and time.monotonic() - message.at >= KEPT:
            self._message = None
            return ""
        return message.text

    def _forget(self, state: str) -> None:
        if self._message is not None and self._message.state != state:
            self._message = None
