"""What local peers know of the run that they take part in, and how they hear of its options."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from hivenb.options.options import Options


class Follower(Protocol):
    """Who trains with the options of a run."""

    def begin(self, options: Options) -> None:
        """Train with these options from now on. Returns at once, and may be called again."""


class Followers:
    """Those who train with the options of a run, for as long as somebody else holds them. Any thread may call."""

    def __init__(self, notify: Callable[[str], None] = lambda text: None) -> None:
        #: called with a few words on what has become of them, for whoever looks at the run
        self.notify = notify
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

    def tell(self, options: Options) -> None:
        """The run trains with these options from now on."""
        with self._lock:
            self._told = options
            for follower in self._followers:
                follower.begin(options)

    def end(self) -> None:
        """The run trains no more: who comes from now on is told nothing until it does again."""
        with self._lock:
            self._told = None


class FollowedRun(Protocol):
    """A run, as those see it who take part in it from other processes: :class:`hivenb.TrainingRun` is one."""

    @property
    def model(self) -> Any:
        """The LightningModule."""

    @property
    def data(self) -> Any:
        """Training data, or a pair of training and validation data."""

    @property
    def options(self) -> Options:
        """The options in force."""

    @property
    def trainer_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of its Trainer."""

    @property
    def followers(self) -> Followers:
        """Who follows its options."""
