"""The top of the dashboard: how the run is doing, the buttons that steer it, the invite, and a line for messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hivenb.view import formats, theme
from hivenb.view.dashboard_state import DashboardState, RunHeader
from hivenb.view.notebook_output import require_ipywidgets
from hivenb.view.style import copy_button, message, note, safe, sheet
from hivenb.view.text import progress

if TYPE_CHECKING:
    from hivenb.run.status import RunStatus
    from hivenb.run.training_length import Length

#: Which buttons can be pressed in which state.
ENABLED: Mapping[str, frozenset[str]] = {
    "ready": frozenset({"start"}),
    "starting": frozenset({"stop"}),
    "training": frozenset({"pause", "stop", "roll_back"}),
    "paused": frozenset({"resume", "stop", "roll_back"}),
    "stopping": frozenset(),
    "stopped": frozenset({"start", "roll_back"}),
    "finished": frozenset({"start", "roll_back"}),
    "failed": frozenset({"start", "roll_back"}),
}

SWARM_CLOSED = "The swarm is closed: nobody can join any more, and the run cannot be started."

_BUTTONS = (
    ("start", "Start", "play", "start training, or go on where it stopped: run.start()"),
    ("pause", "Pause", "pause", "hold on after this batch and stay in the swarm: run.pause()"),
    ("resume", "Resume", "step-forward", "go on: run.resume()"),
    ("stop", "Stop", "stop", "stop after this batch and leave the swarm's rounds: run.stop()"),
    ("roll_back", "Roll back", "undo", "return to the last good state, once there is one: run.roll_back()"),
)


class RunPanel:
    """State, progress, buttons, invite and messages of one run.

    The line for messages is always there, so that none of them moves what is below.

    :param invite: to the swarm; no box for it when empty
    :param actions: what each of ``start``, ``pause``, ``resume``, ``stop`` and ``roll_back`` does; called by the front
        end's handlers, so each must return at once
    :param who_can_join: the swarm, in words
    """

    def __init__(self, invite: str, actions: Mapping[str, Callable[[], None]], who_can_join: str = "") -> None:
        widgets = require_ipywidgets()
        self._status = widgets.HTML(layout=widgets.Layout(width="100%", margin="0"))
        self._message = widgets.HTML(layout=widgets.Layout(width="100%", margin="0", min_height="24px"))
        self._shown_invite, self._is_closed = invite_html(invite, who_can_join), False
        self._invite = widgets.HTML(
            self._shown_invite, layout=widgets.Layout(flex="1 1 260px", min_width="0", margin="2px")
        )
        self.buttons = {}
        for name, label, icon, tooltip in _BUTTONS:
            button = widgets.Button(
                description=label,
                icon=icon,
                tooltip=tooltip,
                disabled=True,
                layout=widgets.Layout(width="auto", min_width="92px", flex="none"),
            )
            button.on_click(lambda _, act=actions[name]: act())
            self.buttons[name] = button
        self.buttons["start"].button_style = "primary"
        steer = widgets.HBox(
            [*self.buttons.values(), self._invite],
            layout=widgets.Layout(flex_flow="row wrap", align_items="center", margin="2px 0 0 0", overflow="visible"),
        )
        self.widget = widgets.VBox(
            [widgets.HTML(sheet(), layout=widgets.Layout(display="none")), self._status, steer, self._message],
            layout=widgets.Layout(width="100%", overflow="visible"),
        )

    def update(self, now: DashboardState, trouble: str, remark: str = "") -> None:
        """Show this state.

        :param now: the state of the dashboard
        :param trouble: what went wrong in the dashboard itself, if anything
        :param remark: what else there is to say, as long as nothing went wrong
        """
        self._status.value = status_html(now.status, now.header)
        enabled = ENABLED.get(str(now.status.state.value), frozenset()) if now.header.swarm_is_open else frozenset()
        for name, button in self.buttons.items():
            button.disabled = name not in enabled
        self._offer_return(now.header.snapshot_epoch)
        if not self._is_closed:
            self._invite.value = self._shown_invite if now.header.swarm_is_open else note(SWARM_CLOSED)
        troubles = "\n".join(text for text in (now.status.error, trouble) if text)
        self.say(troubles or remark, is_trouble=bool(troubles))

    def _offer_return(self, epoch: int | None) -> None:
        button = self.buttons["roll_back"]
        button.disabled = button.disabled or epoch is None
        where = (
            "the last good state, once there is one" if epoch is None else f"the good state of swarm epoch {epoch:,}"
        )
        button.tooltip = f"return to {where}: run.roll_back()"

    def show_invite(self, invite: str, who_can_join: str = "") -> None:
        """Show another invite from now on; none when empty."""
        self._shown_invite = invite_html(invite, who_can_join)

    def say(self, text: str, is_trouble: bool) -> None:
        """Show a message; none when empty."""
        self._message.value = message(text, is_trouble)

    def close(self) -> None:
        """Grey the buttons out and say why."""
        self._is_closed = True
        for button in self.buttons.values():
            button.disabled = True
        self._invite.value = note("This dashboard is closed; hivenb.Dashboard(run) shows a live one.")


def status_html(status: RunStatus, header: RunHeader) -> str:
    """A run's state and name, how far it is, its figures with their units, and the progress to its next epoch."""
    state = str(status.state.value)
    share = status.samples / status.target_batch_size if status.target_batch_size else 0.0
    percent = 100 * min(max(share, 0.0), 1.0)
    figures = [f"swarm epoch <b>{formats.count(status.epoch)}</b>", _goal(header.length), _times(header.length)]
    if status.num_peers:
        figures.append(f"<b>{formats.count(status.num_peers)}</b> {'peer' if status.num_peers == 1 else 'peers'}")
    figures.append(_speed(status.swarm_samples_per_second, "samples/s"))
    if status.loss is not None:
        figures.append(f"loss <b>{safe(formats.value(status.loss))}</b>")
    if status.skipped_batches:
        batches = "batch" if status.skipped_batches == 1 else "batches"
        figures.append(f"<b>{formats.count(status.skipped_batches)}</b> {batches} skipped")
    origin = f'<span class="unit">{safe(status.origin)}</span>' if status.origin else ""
    spans = f'<span class="name" title="run_id={safe(repr(header.name))}">{safe(header.name)}</span>'
    spans += origin + "".join(f'<span class="unit">{figure}</span>' for figure in figures if figure)
    dot = f'<span class="dot" style="background: {theme.STATES.get(state, theme.GREY)}"></span>'
    return (
        f'<div class="hivenb-header"><div class="hivenb-facts"><span>{dot}<b>{safe(formats.state(state))}</b></span>'
        f"{spans}</div>"
        '<div class="hivenb-progress"><div class="track" role="progressbar" aria-valuemin="0" '
        f'aria-valuemax="100" aria-valuenow="{percent:.0f}" aria-label="samples to the next swarm epoch">'
        f'<div class="done" style="width: {percent:.1f}%"></div></div>'
        f'<div class="words">{safe(progress(status))}</div></div></div>'
    )


def _goal(length: Length) -> str:
    if length.goal is None:
        return ""
    title = "passes over the data of this peer" if length.unit == "pass" else "batches of this peer"
    done = f"<b>{formats.count(length.done)} of {formats.count(length.goal)}</b>"
    return f'<span title="{title}">{length.unit} {done}</span>'


def _times(length: Length) -> str:
    if not length.seconds:
        return ""
    rest = "" if length.seconds_left is None else f", about {safe(formats.duration(length.seconds_left))} to go"
    what = "without stops and pauses, while the charts' time goes on from the first start"
    return f'<span title="{what}">trained <b>{safe(formats.duration(length.seconds))}</b>{rest}</span>'


def invite_html(invite: str, who_can_join: str = "") -> str:
    """The invite in a box with a button that copies it, and who can join."""
    if not invite:
        return ""
    who = f'<span class="hivenb-note" style="white-space: nowrap">{safe(who_can_join)}</span>' if who_can_join else ""
    return (
        '<div class="hivenb-invite"><span class="hivenb-note">invite</span>'
        f'<input readonly aria-label="invite" data-lm-suppress-shortcuts="true" value="{safe(invite)}" '
        f'onclick="this.select()">{copy_button("copy the invite")}{who}</div>'
    )


def _speed(samples_per_second: float | None, unit: str) -> str:
    if not samples_per_second:
        return ""
    number = formats.rate(samples_per_second).split(" ")[0]
    return f"<b>{safe(number)}</b> {unit}"
