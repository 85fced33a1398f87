"""What stands where there is nothing to see yet: true in each state of a run, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass

from hivenb.view import formats

#: States in which nothing more comes by itself.
_ENDED = ("stopped", "finished", "failed")


@dataclass(frozen=True)
class Situation:
    """What of a run decides what is said where there is nothing to see.

    :param state: of the run; empty where a picture is for any moment
    :param steps: batches that this peer has trained on
    :param helps: this peer trains on no batches, and helps the others
    :param local: peers on this machine that are there
    :param coming: peers on this machine that are being started
    :param swarm_is_open: otherwise nobody can join, and the run cannot be started any more
    """

    state: str = ""
    steps: int = 0
    helps: bool = False
    local: int = 0
    coming: int = 0
    swarm_is_open: bool = True

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes, unless somebody starts the run again."""
        return self.state in _ENDED or (self.state == "ready" and not self.swarm_is_open)

    @property
    def can_start(self) -> bool:
        """Whether Start can be pressed."""
        return self.swarm_is_open and self.state in ("ready", *_ENDED)


#: For a picture that shows a run at no moment in particular.
ANY_TIME = Situation()


def no_loss(now: Situation) -> str:
    """Where the loss will be drawn: one line or two."""
    if now.helps and now.state in ("training", "paused"):
        return "this peer only helps:\nit trains on no batches"
    if now.steps > 1 and now.state not in ("", "ready"):
        return "no loss: training_step returns none"
    said = {
        "ready": "no training step yet" if now.swarm_is_open else "no training step",
        "starting": "starting: the first batch comes\nwhen the Trainer is set up",
        "training": "waiting for the first batch",
        "paused": "paused before the first batch",
        "stopping": "stopping before the first batch",
        "stopped": "stopped before the first batch",
        "finished": "finished without a training step",
        "failed": "failed before the first batch",
    }.get(now.state, "no training step yet")
    if now.state == "paused" and now.swarm_is_open:
        return f"{said}:\npress Resume, or call run.resume()"
    if now.can_start and now.state != "finished":
        return f"{said}:\npress Start, or call run.start()"
    return said if now.swarm_is_open or not now.is_over else f"{said};\nthe swarm is closed"


def no_peers_drawn(now: Situation) -> str:
    """Where the number of peers will be drawn: one line or two."""
    if now.is_over:
        return "no peer was seen" if now.swarm_is_open else "no peer was seen;\nthe swarm is closed"
    if now.state in ("starting", "training", "paused", "stopping"):
        return "looking for peers"
    if now.local:
        return f"{formats.counted(now.local, 'peer')} on this machine:\n{_waits(now.local)} for the run to start"
    if now.coming:
        return (
            f"{formats.counted(now.coming, 'peer')} on this machine\n{'is' if now.coming == 1 else 'are'} being started"
        )
    return "no peers yet: send others the invite,\nor add some on this machine"


def no_peers_listed(now: Situation) -> str:
    """In place of the list of peers: a sentence."""
    if not now.swarm_is_open:
        return "No peer was seen. The swarm is closed: nobody can join any more."
    if now.state in _ENDED:
        return "No peer was seen while the run trained."
    if now.state in ("starting", "training", "paused", "stopping"):
        return "Looking for peers: the list begins with the swarm's first answer."
    if now.local:
        return (
            f"{formats.counted(now.local, 'peer')} on this machine: {_waits(now.local)} for the run to start, and the "
            "list begins with it. Press Start, or call run.start()."
        )
    if now.coming:
        are = "is" if now.coming == 1 else "are"
        return (
            f"{formats.counted(now.coming, 'peer')} on this machine {are} being started; the list begins with the run."
        )
    return (
        "No peers yet: the list begins when the run starts. Give others the invite, or add two peers on this machine "
        "with swarm.add_local_peers(2, run)."
    )


def none_of(things: str, now: Situation) -> str:
    """Where some things will be drawn: ``no epoch yet``, or ``no epoch`` once none will come."""
    return f"no {things}" if now.is_over else f"no {things} yet"


def _waits(number: int) -> str:
    return "it waits" if number == 1 else "they wait"
