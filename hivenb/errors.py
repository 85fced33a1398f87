"""Every exception that hivenb raises on purpose.

Each message says what happened, with which value, and what to do about it.
"""

from __future__ import annotations

from typing import Any


class HivenbError(Exception):
    """Base of all errors that hivenb raises on purpose."""


class OptionsError(HivenbError, ValueError):
    """One or more options have a wrong value, or do not go together."""


class SwarmError(HivenbError):
    """The swarm's DHT could not be started, joined or read."""


class ProcessEndedError(SwarmError, RuntimeError):
    """A process that training needs has ended by itself, or was killed.

    :param message: what has ended, and how
    :param title: what it is called
    """

    def __init__(self, message: str, title: str = "a process"):
        super().__init__(message)
        self.title = title

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.title)


class UnbelievedStateError(SwarmError):
    """No peer sends a state that can be taken over: not finite, of an impossible epoch, or contradicted by others."""


class NotInvitedError(SwarmError):
    """A private swarm does not let this peer in: its invite is missing, of another swarm, or good no more."""


class InviteError(SwarmError, ValueError):
    """An invite or a peer address cannot be read."""


class DamagedTensorError(HivenbError, ValueError):
    """What a peer has sent is no tensor, or not the one that it says it is."""


class TrainingError(HivenbError, RuntimeError):
    """A training run cannot do what was asked of it in its present state."""


class NotFiniteError(HivenbError, ArithmeticError):
    """Too many batches in a row had gradients that are not finite; none of them has changed the model."""

    #: what to do about it
    REMEDY = (
        "Lower the learning rate, or warm it up; look for nan, inf and empty rows in the data, and for a logarithm, a "
        "root or a division by zero in the loss: Trainer(detect_anomaly=True) names the operation. In half precision, "
        "precision='bf16-mixed' or '32-true' has more range"
    )


class LocalPeerError(HivenbError, RuntimeError):
    """A peer process on this machine could not be started, or ended by itself."""


class PlatformError(HivenbError, OSError):
    """This machine cannot run hivemind, for example because it is not Linux."""

    #: what to do where processes can share too little memory
    MORE_SHARED_MEMORY = (
        "A container gets more with docker run --shm-size=2g (or --ipc=host); elsewhere: mount -o remount,size=2g "
        "/dev/shm"
    )


class MissingDependencyError(HivenbError, ImportError):
    """An optional package is needed for what was asked, and is not installed."""
