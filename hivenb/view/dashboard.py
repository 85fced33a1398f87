"""The dashboard: everything about a run at one glance, and the buttons that steer it."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.errors import HivenbError, OptionsError
from hivenb.figures.advice import in_words
from hivenb.figures.earlier_history import whole
from hivenb.figures.predicted_traffic import buffer_bytes, tensor_shapes
from hivenb.run.local_peer_count import local_peer_count
from hivenb.run.status import who_trains_elsewhere
from hivenb.view import notebook_output, text
from hivenb.view.chart_panel import ChartPanel
from hivenb.view.charts.drawing import ChartImage
from hivenb.view.closed_dashboard import ClosedDashboard
from hivenb.view.dashboard_state import DashboardState
from hivenb.view.log_panel import AdvicePanel, CodePanel, LogPanel
from hivenb.view.marks_panel import MarksPanel
from hivenb.view.messages import Messages
from hivenb.view.options_panel import OptionsPanel, together, waiting
from hivenb.view.peers_panel import PeersPanel
from hivenb.view.run_panel import RunPanel

if TYPE_CHECKING:
    from hivenb.run.training import TrainingRun


# -- refresher -------------------------------------------------------------------------------------------------------
#
# The one thread that writes a dashboard's widgets.
#
# ipywidgets does not lock a widget's state, and a handler that works keeps the kernel busy. So handlers only hand
# their work in here, and all drawing happens here.


_open: weakref.WeakSet[Refresher] = weakref.WeakSet()

#: Drawing may take at most this share of the thread's time, so that a slow machine trains rather than draws.
_BUSY_SHARE = 0.25


class Refresher:
    """Draws again and again, at a bounded pace, and does what handlers hand in. It never prints.

    :param draw: draws a frame if something has changed
    :param failed: shows what went wrong; called on this thread with the exception and "draw" or "action"
    :param interval: least seconds between two frames
    """

    def __init__(
        self, draw: Callable[[], None], failed: Callable[[Exception, str], None], interval: float = 0.5
    ) -> None:
        self._draw = draw
        self._failed = failed
        self._interval = interval
        self._actions: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = BackgroundThread(target=self._work, name="hivenb-dashboard")
        self.error: Exception | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it still draws."""
        return self._thread.is_alive()

    @property
    def has_work(self) -> bool:
        """Whether something was handed in and not done yet."""
        return bool(self._actions)

    def start(self) -> None:
        """Begin to draw."""
        _open.add(self)
        self._thread.start()

    def submit(self, action: Callable[[], None]) -> None:
        """Have something done on the thread soon, in the order of the calls; returns at once.

        :param action: what it raises is shown, not lost
        """
        self._actions.append(action)
        self._wake.set()

    def close(self, timeout: float = 5.0) -> None:
        """Draw the last frame and end. May be called twice, and from any thread.

        :param timeout: seconds to wait for the thread; drawing that hangs for longer ends with the process
        """
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        _open.discard(self)

    def _work(self) -> None:
        due = 0.0
        while not self._closed.is_set():
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
            self._act()
            if time.monotonic() >= due:
                began = time.monotonic()
                self._attempt(self._draw, "draw")
                took = time.monotonic() - began
                due = began + max(self._interval, took / _BUSY_SHARE)
        self._act()
        self._attempt(self._draw, "draw")

    def _act(self) -> None:
        while self._actions:
            self._attempt(self._actions.popleft(), "action")

    def _attempt(self, task: Callable[[], None], kind: str) -> None:
        try:
            task()
        except Exception as error:
            # This thread must not end, and must not print: the panel is where errors belong.
            self.error = error
            try:
                self._failed(error, kind)
            except Exception as worse:
                self.error = worse


@atexit.register
def _close_all() -> None:
    # A thread inside of Agg while the interpreter is taken apart can crash the process.
    for refresher in list(_open):
        refresher.close(timeout=1.0)


# -- saved picture ---------------------------------------------------------------------------------------------------
#
# The picture that is saved with a notebook in the output of a dashboard, for pages that no kernel is behind.
#
# Front ends save the state of widgets only if they are told to, and some pages show no widgets at all. A picture in
# the same output is saved with the notebook, and shown wherever the widgets are not.


_EVENT = "post_run_cell"


class SavedPicture:
    """Draws the charts of a run that does not train, after each cell that has changed them: on the main thread.

    :param run: what to draw; it is not kept alive
    :param show: called with a picture, as PNG
    """

    def __init__(self, run: TrainingRun, show: Callable[[bytes], None]) -> None:
        from IPython import get_ipython

        self._run, self.show = weakref.ref(run), show
        self._drawn: int | None = None
        self._events: Any = get_ipython().events
        self._events.register(_EVENT, self.look)

    def look(self, _result: Any = None) -> None:
        """Draw what is new, unless it changes all the time."""
        run = self._run()
        if run is None:
            self.close()
        elif not run.status.state.is_active:
            snapshot = whole(run.history.snapshot())
            if snapshot.series and snapshot.version != self._drawn:
                self._drawn = snapshot.version
                self.show(ChartImage().png(snapshot))

    def close(self) -> None:
        """Draw no more. May be called twice."""
        events, self._events = self._events, None
        if events is not None:
            events.unregister(_EVENT, self.look)


# -- dashboard -------------------------------------------------------------------------------------------------------


#: A cell that is run again leaves its former dashboard behind, drawing for nobody.
MAX_LIVE = 3

_ADVICE_TAB = 1

_ENDED = ("stopped", "finished", "failed")

_live: list[Dashboard] = []


class Dashboard:
    """Watch and steer a run in a notebook. As the last line of a cell it shows itself.

    Nothing happens until it is shown; then background threads keep it up to date until :meth:`close`, or until the
    swarm is closed. Of one run, and of all runs that have ended, the three newest dashboards are live. Where there are
    no widgets it shows the same as text.

    :param run: what to watch
    :param refresh_interval: least seconds between two frames, at least 0.5
    :raises HivenbError: if the interval is too short
    """

    def __init__(self, run: TrainingRun, refresh_interval: float = 0.5) -> None:
        if not refresh_interval >= 0.5:
            raise HivenbError(f"refresh_interval={refresh_interval!r} s is too short for a browser to follow; use 0.5")
        self._run = weakref.ref(run)
        self._kept: TrainingRun | None = run
        self._interval = refresh_interval
        self._last_name = self._last_text = ""
        self._view: _View | None = None
        self._closed: ClosedDashboard | None = None
        self._saved_pictures: list[SavedPicture] = []
        run.swarm.observers.add(self)

    @property
    def run(self) -> TrainingRun:
        """What is watched.

        :raises HivenbError: if it is gone: a dashboard that is closed does not keep it
        """
        run = self._run()
        if run is None:
            raise HivenbError(f"{self._last_name} is closed, and its run is gone: nobody else has kept it")
        return run

    @property
    def widget(self) -> Any:
        """The whole dashboard as one widget, to be put into a layout of your own.

        :raises MissingDependencyError: without ipywidgets
        """
        if self._closed is not None and self._closed.widget is not None:
            return self._closed.widget
        if self._view is None:
            self._kept = self.run
            self._view = _View(self._kept, self._interval)
            _live.append(self)
            for dashboard in _crowded_out(self._kept):
                dashboard.close()
        return self._view.widget

    def text(self) -> str:
        """The same as text, as of now; once the run is gone, as of the end."""
        run = self._run()
        if run is None:
            return self._last_text
        now = DashboardState.of(run)
        return text.summary(now.status, now.snapshot, now.members, now.advice, now.situation, now.header.name)

    def close(self) -> None:
        """Stop watching, and let go of the run; the last picture stays. May be called twice."""
        with contextlib.suppress(ValueError):  # closed already, or never shown
            _live.remove(self)
        view, self._view = self._view, None
        pictures, self._saved_pictures = self._saved_pictures, []
        if view is not None:
            view.close()
            self._closed = ClosedDashboard(view.widget, view.chart_panel.image)
        for picture in pictures:
            picture.look()
            picture.close()
            if self._closed is not None:
                self._closed.shown_by(picture.show)
        if self._kept is not None:
            self._last_name, self._last_text, self._kept = repr(self), self.text(), None

    def __repr__(self) -> str:
        run = self._run()
        return self._last_name if run is None else f"Dashboard(run {run.options.run_id!r})"

    def _ipython_display_(self, **_: Any) -> None:
        is_left = self._closed is not None and self._closed.widget is not None
        if not notebook_output.widgets_work() or (self._run() is None and not is_left):
            notebook_output.show_text(self.text())
            return
        show = notebook_output.show_widget(self.widget, repr(self))
        if self._view is not None:
            self._saved_pictures.append(SavedPicture(self.run, show))
        elif self._closed is not None:
            self._closed.shown_by(show)


def _crowded_out(run: TrainingRun) -> list[Dashboard]:
    """The dashboards that make place for a new one of this run."""
    of_this = [one for one in _live if one._kept is run]
    ended = [one for one in _live if one._kept and str(one._kept.status.state.value) in _ENDED]
    return [*of_this[:-MAX_LIVE], *ended[:-MAX_LIVE]]


class _View:
    """The widgets of one dashboard, and the threads that keep them up to date."""

    def __init__(self, run: TrainingRun, interval: float) -> None:
        self._run = run
        self._drawn: tuple[Any, ...] | None = None
        self._messages = Messages()
        self._is_closed = False
        self._refresher = Refresher(self._draw, self._failed, interval)

        self._invited_to = run.swarm.newest_run_id, run.swarm.banned
        self.run_panel = RunPanel(
            self._invite(),
            {
                "start": self._handing_in(run.start),
                "pause": self._handing_in(run.pause),
                "resume": self._handing_in(run.resume),
                "stop": self._handing_in(lambda: run.stop(wait=False)),
                "roll_back": self._handing_in(self._roll_back),
            },
            run.swarm.who_can_join,
        )
        self.options_panel = OptionsPanel(self._change_option, tensor_shapes(run.model), buffer_bytes(run.model))
        self.peers_panel = PeersPanel(self._ask_for_local_peers, self._restart_local_peers, self._block, self._ban)
        self.log_panel, self.code_panel, self.marks_panel = LogPanel(), CodePanel(), MarksPanel(self._take_back)
        self.advice_panel = AdvicePanel(self._follow_advice)
        self.chart_panel = ChartPanel(self._draw_charts_again)
        self._arrange()
        self._attempt_first_frame()
        self._refresher.start()

    def _arrange(self) -> None:
        widgets = notebook_output.require_ipywidgets()
        middle = widgets.HBox(
            [self.chart_panel.widget, self.options_panel.widget],
            layout=widgets.Layout(flex_flow="row wrap", align_items="flex-start", margin="0", overflow="visible"),
        )
        panels = {
            "Peers": self.peers_panel.widget,
            "Advice": self.advice_panel.widget,
            "Log": self.log_panel.widget,
            "Code": self.code_panel.widget,
            "Marks": self.marks_panel.widget,
            "More switches": self.options_panel.rarer,
        }
        self.tabs = widgets.Tab(list(panels.values()), layout=widgets.Layout(margin="4px 0 0 0"))
        for index, title in enumerate(panels):
            self.tabs.set_title(index, title)
        self.widget = widgets.VBox(
            [self.run_panel.widget, middle, self.tabs], layout=widgets.Layout(width="100%", overflow="hidden")
        )
        self.widget.add_class("hivenb")

    def close(self) -> None:
        self._is_closed = True
        self._refresher.close()
        self.run_panel.close()
        self.options_panel.close()
        self.chart_panel.close()
        self.advice_panel.close()
        self.marks_panel.close()
        self.peers_panel.close()

    def _invite(self) -> str:
        try:
            return self._run.swarm.invite
        except HivenbError as error:
            # A run whose swarm is closed can still be looked at.
            self._say(str(error), is_trouble=True)
            return ""

    def _look_at_invite(self) -> None:
        """Show the invite anew when it leads to another run, or lets others in than before."""
        shown = self._run.swarm.newest_run_id, self._run.swarm.banned
        if shown != self._invited_to:
            self._invited_to = shown
            self._refresher.submit(lambda: self.run_panel.show_invite(self._invite(), self._run.swarm.who_can_join))

    def _attempt_first_frame(self) -> None:
        # Before the thread starts, so that what appears under the cell is complete at once.
        try:
            self._draw()
        except Exception as error:
            self._failed(error, "draw")

    def _handing_in(self, action: Callable[[], Any]) -> Callable[[], None]:
        def act() -> None:
            self._begin()
            action()

        return lambda: None if self._is_closed else self._refresher.submit(act)

    def _begin(self) -> None:
        """A person does something: what was said before is over."""
        self._messages.act(self._run.options_error)

    def _say(self, text: str, is_trouble: bool = False) -> None:
        self._messages.say(text, str(self._run.status.state.value), is_trouble=is_trouble)

    def _roll_back(self) -> None:
        epoch = self._run.roll_back(wait=False)
        when = "" if self._run.is_active else " when the run starts again"
        self._say(f"Returns to the state of swarm epoch {epoch:,}{when}.")

    def _draw_charts_again(self) -> None:
        # What is wrong stays said meanwhile.
        if not self._is_closed:
            self._refresher.submit(self.chart_panel.refresh)

    def _change_option(self, name: str, value: Any) -> None:
        def change() -> None:
            self._begin()
            before = self._run.pending_options or self._run.options
            try:
                after = before.with_prerequisites(**{name: value})
            except OptionsError as error:
                self.options_panel.mark_wrong(name, str(error))
                if not self.options_panel.is_written(name):
                    raise
                return
            self.options_panel.mark_wrong(name, "")
            self._run.apply(after, wait=False)
            self._say(together(before, after, name))

        if not self._is_closed:
            self._refresher.submit(change)

    def _ask_for_local_peers(self, count: int) -> None:
        if not self._is_closed:
            local_peer_count(self._run).ask_for(count)

    def _block(self, peer_id: str, is_blocked: bool) -> None:
        def change() -> None:
            swarm = self._run.swarm
            (swarm.block if is_blocked else swarm.unblock)(peer_id)

        self._handing_in(change)()

    def _ban(self, peer_id: str) -> None:
        self._handing_in(lambda: self._run.swarm.ban(peer_id))()

    def _restart_local_peers(self, restart: bool) -> None:
        def change() -> None:
            local_peer_count(self._run).restart = restart

        self._handing_in(change)()

    def _follow_advice(self, changes: Mapping[str, Any]) -> None:
        self._apply(changes, "As advised")

    def _take_back(self, changes: Mapping[str, Any]) -> None:
        self._apply(changes, "Taken back")

    def _apply(self, changes: Mapping[str, Any], said: str) -> None:
        def change() -> None:
            self._begin()
            self._run.apply(wait=False, **changes)
            self._say(f"{said}: {in_words(changes)}.")

        if not self._is_closed:
            self._refresher.submit(change)

    def _failed(self, error: Exception, kind: str) -> None:
        known = isinstance(error, HivenbError)
        words = str(error) if known else f"{type(error).__name__}: {error}"
        self._drawn = None
        if kind == "draw":
            self.run_panel.say(f"The dashboard could not be drawn: {words}", is_trouble=True)
        else:
            self._say(words, is_trouble=True)

    def _draw(self) -> None:
        now = DashboardState.of(self._run)
        self._look_at_invite()
        state = str(now.status.state.value)
        trouble = self._messages.trouble(state, self._run.options_error)
        remark = self._messages.remark(state, is_pending=now.options.pending is not None)
        elsewhere = now.status.elsewhere
        others = who_trains_elsewhere(elsewhere, now.header.name) if elsewhere else ""
        remark = " ".join(text for text in (waiting(now.options, state), remark, others) if text)
        who = (now.members, now.local, now.blocked)
        seen = (now.snapshot.version, now.status, now.header, who, now.options, now.log, trouble, remark)
        if seen != self._drawn:
            self._show(now, trouble, remark)
            self._drawn = seen
        # at a pace of its own
        is_at_rest = self._is_closed or not now.status.state.is_active
        self.chart_panel.update(whole(now.snapshot), at_once=is_at_rest, now=now.situation)

    def _show(self, now: DashboardState, trouble: str, remark: str) -> None:
        self.run_panel.update(now, trouble, remark)
        if not self._refresher.has_work:
            # A change that still waits would look as if it had been undone.
            self.options_panel.update(now)
        self.peers_panel.update(now)
        self._show_advice(now)
        self.log_panel.update(now)
        self.code_panel.update(now)
        self.marks_panel.update(now)

    def _show_advice(self, now: DashboardState) -> None:
        before = self.advice_panel.title
        self.advice_panel.update(now)
        if self.advice_panel.title != before:
            self.tabs.set_title(_ADVICE_TAB, self.advice_panel.title)
