"""The dashboard: everything about a run at one glance, and the buttons that steer it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hivenb.errors import HivenbError, OptionsError
from hivenb.figures.predicted_traffic import buffer_bytes, tensor_shapes
from hivenb.run.local_peer_count import local_peer_count
from hivenb.view import display, text
from hivenb.view.advice_panel import AdvicePanel
from hivenb.view.chart_panel import ChartPanel
from hivenb.view.dashboard_state import DashboardState
from hivenb.view.log_panel import CodePanel, LogPanel
from hivenb.view.options_panel import OptionsPanel, together
from hivenb.view.peers_panel import PeersPanel
from hivenb.view.refresher import Refresher
from hivenb.view.run_panel import RunPanel
from hivenb.view.saved_picture import SavedPicture

if TYPE_CHECKING:
    from hivenb.run.training import TrainingRun

#: A cell that is run again leaves its former dashboard behind, drawing for nobody.
MAX_LIVE = 3

_ADVICE_TAB = 1

_live: weakref.WeakKeyDictionary[TrainingRun, list[Dashboard]] = weakref.WeakKeyDictionary()


class Dashboard:
    """Watch and steer a run in a notebook. As the last line of a cell it shows itself.

    Nothing happens until it is shown; then background threads keep it up to date until :meth:`close`. Of one
    run, the three newest dashboards are live. Where there are no widgets it shows the same as text.

    :param run: what to watch
    :param refresh_interval: least seconds between two frames, at least 0.5
    :raises HivenbError: if the interval is too short
    """

    def __init__(self, run: TrainingRun, refresh_interval: float = 0.5) -> None:
        if not refresh_interval >= 0.5:
            raise HivenbError(f"refresh_interval={refresh_interval!r} s is too short for a browser to follow; use 0.5")
        self.run = run
        self._interval = refresh_interval
        self._view: _View | None = None
        self._saved_pictures: list[SavedPicture] = []

    @property
    def widget(self) -> Any:
        """The whole dashboard as one widget, to be put into a layout of your own.

        :raises MissingDependencyError: without ipywidgets
        """
        if self._view is None:
            self._view = _View(self.run, self._interval)
            older = _live.setdefault(self.run, [])
            older.append(self)
            for dashboard in older[:-MAX_LIVE]:
                dashboard.close()
        return self._view.widget

    def text(self) -> str:
        """The same as text, as of now."""
        now = DashboardState.of(self.run)
        return text.summary(now.status, now.snapshot, now.members, now.advice)

    def close(self) -> None:
        """Stop watching; the last picture stays. May be called twice."""
        if self._view is not None:
            self._view.close()
        while self._saved_pictures:
            picture = self._saved_pictures.pop()
            picture.look()
            picture.close()
        live = _live.get(self.run, [])
        if self in live:
            live.remove(self)

    def __repr__(self) -> str:
        return f"Dashboard(run {self.run.options.run_id!r})"

    def _ipython_display_(self, **_: Any) -> None:
        if display.widgets_work():
            self._saved_pictures.append(SavedPicture(self.run, display.show_widget(self.widget, repr(self))))
        else:
            display.show_text(self.text())


class _View:
    """The widgets of one dashboard, and the threads that keep them up to date."""

    def __init__(self, run: TrainingRun, interval: float) -> None:
        widgets = display.require_ipywidgets()
        self._run = run
        self._drawn: tuple[Any, ...] | None = None
        self._troubles = {"action": "", "draw": ""}
        self._remark = ""
        self._is_closed = False
        self._refresher = Refresher(self._draw, self._failed, interval)

        self.run_panel = RunPanel(
            self._invite(),
            {
                "start": self._handing_in(run.start),
                "pause": self._handing_in(run.pause),
                "resume": self._handing_in(run.resume),
                "stop": self._handing_in(lambda: run.stop(wait=False)),
            },
        )
        self.options_panel = OptionsPanel(self._change_option, tensor_shapes(run.model), buffer_bytes(run.model))
        self.peers_panel = PeersPanel(self._ask_for_local_peers)
        self.log_panel, self.code_panel = LogPanel(), CodePanel()
        self.advice_panel = AdvicePanel(self._follow_advice)
        self.chart_panel = ChartPanel(self._handing_in(lambda: None))
        middle = widgets.HBox(
            [self.chart_panel.widget, self.options_panel.widget],
            layout=widgets.Layout(flex_flow="row wrap", align_items="flex-start", margin="8px 0 4px 0"),
        )
        panels = (self.peers_panel, self.advice_panel, self.log_panel, self.code_panel)
        self.tabs = tabs = widgets.Tab([panel.widget for panel in panels])
        for index, title in enumerate(("Peers", "Advice", "Log", "Code")):
            tabs.set_title(index, title)
        self.widget = widgets.VBox(
            [self.run_panel.widget, middle, tabs], layout=widgets.Layout(width="100%", overflow="hidden")
        )
        self.widget.add_class("hivenb")
        self._attempt_first_frame()
        self._refresher.start()

    def close(self) -> None:
        self._is_closed = True
        self._refresher.close()
        self.run_panel.close()
        self.options_panel.close()
        self.chart_panel.close()
        self.advice_panel.close()
        self.peers_panel.close()

    def _invite(self) -> str:
        try:
            return self._run.swarm.invite
        except HivenbError as error:
            # A run whose swarm is closed can still be looked at.
            self._troubles["action"] = str(error)
            return ""

    def _attempt_first_frame(self) -> None:
        # Before the thread starts, so that what appears under the cell is complete at once.
        try:
            self._draw()
        except Exception as error:
            self._failed(error, "draw")

    def _handing_in(self, action: Callable[[], Any]) -> Callable[[], None]:
        def act() -> None:
            action()
            self._troubles["action"] = ""

        return lambda: None if self._is_closed else self._refresher.submit(act)

    def _change_option(self, name: str, value: Any) -> None:
        def change() -> None:
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
            self._troubles["action"] = ""
            self._remark = together(before, after, name)

        if not self._is_closed:
            self._refresher.submit(change)

    def _ask_for_local_peers(self, count: int) -> None:
        if not self._is_closed:
            local_peer_count(self._run).ask_for(count)

    def _follow_advice(self, changes: Mapping[str, Any]) -> None:
        def change() -> None:
            self._run.apply(wait=False, **changes)
            self._troubles["action"] = ""
            self._remark = ""

        if not self._is_closed:
            self._refresher.submit(change)

    def _failed(self, error: Exception, kind: str) -> None:
        known = isinstance(error, HivenbError)
        words = str(error) if known else f"{type(error).__name__}: {error}"
        self._troubles[kind] = words if kind == "action" else f"The dashboard could not be drawn: {words}"
        self._drawn = None
        if kind == "draw":
            self.run_panel.show_trouble(self._troubles[kind])

    def _draw(self) -> None:
        now = DashboardState.of(self._run)
        trouble = self._troubles["action"]
        trouble = "\n".join(words for words in (trouble, now.options.error) if words)
        who = (now.members, now.local, now.local_ids)
        seen = (now.snapshot.version, now.status, who, now.options, now.log, trouble, self._remark)
        if seen != self._drawn:
            self._show(now, trouble)
            self._drawn = seen
        # at a pace of its own
        self.chart_panel.update(now.snapshot, at_once=self._is_closed or not now.status.state.is_active)
        self._troubles["draw"] = ""

    def _show(self, now: DashboardState, trouble: str) -> None:
        self.run_panel.update(now, trouble)
        if not self._refresher.has_work:
            # A change that still waits would look as if it had been undone.
            self.options_panel.update(now, self._remark)
        self.peers_panel.update(now)
        self._show_advice(now)
        self.log_panel.update(now)
        self.code_panel.update(now)

    def _show_advice(self, now: DashboardState) -> None:
        before = self.advice_panel.title
        self.advice_panel.update(now)
        if self.advice_panel.title != before:
            self.tabs.set_title(_ADVICE_TAB, self.advice_panel.title)
