"""Histories of rounds for tests of what is made of them, written down as a run would have recorded them."""

from __future__ import annotations

from hivenb.figures.advice import Advice, advise
from hivenb.history import History
from hivenb.options import Options

OPTIONS = Options(target_batch_size=2048)


class HistoryOfRounds:
    """A history to which rounds are added one by one, in the order in which a run records them."""

    def __init__(self, capacity: int = 2048) -> None:
        self.history = History(capacity)
        self.epoch = 0
        self.now = 1000.0
        self.rate = 0.0  # bytes per second that are sent while training stands still
        self.sent = 0.0

    def peers(self, count: int) -> None:
        self.history.record("peers", count, epoch=self.epoch, time=self.now)

    def add_round(
        self,
        size: int = 4,
        *,
        peers: int = 4,
        failed: bool = False,
        stalled: float = 0.0,
        quiet: float = 0.0,
        computing: float = 10.0,
    ) -> None:
        self.peers(peers)
        for seconds, rate in ((computing + quiet, 0.0), (stalled - quiet, self.rate)):
            self._transfer(seconds, rate)
        self.epoch += 1
        self.history.record("stalled_seconds", stalled, epoch=self.epoch, time=self.now)
        self.history.record("group_size", 1 if failed else size, epoch=self.epoch, time=self.now)
        if failed:
            self.history.mark("round", f"round failed in epoch {self.epoch}: nobody came", time=self.now + 1e-4)
        self.now += 1e-3
        self.peers(peers)

    def _transfer(self, seconds: float, rate: float) -> None:
        """Time goes by, and what is sent with it is measured each second; as much comes in, at twice the rate."""
        for step in range(int(seconds)):
            self.sent += rate
            if self.rate:
                self.history.record("bytes_sent", self.sent, epoch=self.epoch, time=self.now + step + 1)
                self.history.record("bytes_received", self.sent / 2, epoch=self.epoch, time=self.now + step + 1)
        self.now += seconds

    def add_rounds(self, count: int, **what: object) -> HistoryOfRounds:
        for _ in range(count):
            self.add_round(**what)  # type: ignore[arg-type]
        return self

    def changed(self, text: str = "matchmaking time: 10.0") -> None:
        self.history.mark("option", text, time=self.now)

    def advice(self, options: Options = OPTIONS) -> tuple[Advice, ...]:
        return advise(self.history.snapshot(), options)

    def rules(self, options: Options = OPTIONS) -> list[str]:
        return [advice.rule for advice in self.advice(options)]


def standing_still(share: float, rounds: int = 10, seconds: float = 10.0, **what: object) -> HistoryOfRounds:
    """Rounds of ten seconds of which training stood still for a share."""
    return HistoryOfRounds().add_rounds(rounds, stalled=share * seconds, computing=(1 - share) * seconds, **what)
