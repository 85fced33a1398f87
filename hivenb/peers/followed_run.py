"""What local peers know of the run that they take part in, and how they hear of its options."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import cloudpickle

from hivenb.errors import OptionsError
from hivenb.options.options import FIELDS, Options


def pack_options(options: Options) -> bytes:
    """Options, to be sent to another process.

    :returns: them, pickled
    :raises OptionsError: if they cannot be, with the name of the one that is to blame
    """
    try:
        return cloudpickle.dumps(options)
    except Exception as e:  # of any kind: it is the user's object that refuses
        name, value = next(iter(_not_packable(options)), ("options", options))
        raise OptionsError(
            f"{name}={value!r} cannot be sent to the peers on this machine ({type(e).__name__}: {e}); keep open files, "
            "locks and runs out of it, or remove those peers first"
        ) from e


def _not_packable(options: Options) -> Iterator[tuple[str, Any]]:
    for name in FIELDS:
        try:
            cloudpickle.dumps(getattr(options, name))
        except Exception:  # what it is has been said of the whole
            yield name, getattr(options, name)


class Follower(Protocol):
    """Who trains with the options of a run."""

    def begin(self, options: Options) -> None:
        """Train with these options from now on. Returns at once, and may be called again."""


class Followers:
    """Those who train with the options of a run, for as long as somebody else holds them. Any thread may call."""

    def __init__(self, notify: Callable[[str], None] = lambda text: None, experiment: str = "") -> None:
        #: called with a few words on what has become of them, for whoever looks at the run
        self.notify = notify
        #: what a person calls the run that they follow, and others that came before it; see ``swarm/run_names.py``
        self.experiment = experiment
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._told: Options | None = None
        self._lock = threading.Lock()  # nobody hears of older options after newer ones

    def add(self, follower: Follower) -> None:
        """Tell somebody all options from now on; at once those that the run trains with, if it trains."""
        with self._lock:
            self._followers.add(follower)
            if self._told is not None:
                follower.begin(self._told)

    def __contains__(self, follower: object) -> bool:
        return follower in self._followers

    def check(self, options: Options) -> None:
        """Refuse options of which those who are here cannot be told.

        :raises OptionsError: if they cannot be sent to another process
        """
        if self._followers:
            pack_options(options)

    def tell(self, options: Options) -> None:
        """The run trains with these options from now on.

        :raises OptionsError: if they cannot be sent to another process; nobody has been told then
        """
        with self._lock:
            for follower in self._followers:
                follower.begin(options)
            self._told = options

    def end(self) -> None:
        """The run trains no more: who comes from now on is told nothing until it does again."""
        with self._lock:
            self._told = None


class FollowedRun(Protocol):
    """A run, as those see it who take part in it from other processes: :class:`hivenb.TrainingRun` is one."""

    def take_name(self) -> None:
        """Have a name in the DHT from now on that is its own; called before anybody follows it there."""

    @property
    def swarm(self) -> Any:
        """The :class:`hivenb.Swarm` in which it trains."""

    @property
    def model(self) -> Any:
        """The LightningModule."""

    @property
    def data(self) -> Any:
        """Training data, or a tuple of training and validation data."""

    @property
    def options(self) -> Options:
        """The options in force."""

    @property
    def trainer_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of its Trainer."""

    @property
    def followers(self) -> Followers:
        """Who follows its options."""
