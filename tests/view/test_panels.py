"""The panels: what they say, what can be pressed, and that nothing foreign becomes HTML."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from hivenb.engine.network.addresses import Reach
from hivenb.figures.predicted_traffic import tensor_shapes
from hivenb.options import FIELDS, Options
from hivenb.options.choices import PowerSGD
from hivenb.run.local_peer_count import LocalCount
from hivenb.run.status import RunState
from hivenb.view.dashboard_state import DashboardState, LocalPeersNow, RunHeader
from hivenb.view.log_panel import CodePanel, LogPanel, log_html
from hivenb.view.options_panel import OptionsPanel, shown, together, waiting
from hivenb.view.peers_panel import MAX_ROWS, PeersPanel, local_html, peers_html
from hivenb.view.run_panel import ENABLED, RunPanel, invite_html, status_html

EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"


def words_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).strip()


BUTTONS = ("start", "pause", "resume", "stop", "roll_back")


def run_panel(invite: str = "hivenb://invite", pressed: list[str] | None = None) -> RunPanel:
    calls = [] if pressed is None else pressed
    return RunPanel(invite, {name: lambda name=name: calls.append(name) for name in BUTTONS})


def test_the_status_says_every_number_with_its_unit(status: Any) -> None:
    text = words_of(status_html(status, RunHeader("digits")))
    assert text == (
        "ready to start digits swarm epoch 14 3 peers 412 samples/s loss 0.412 1,310 / 2,048 samples, 3 s left"
    )


@pytest.mark.parametrize("samples", [0, 5000])
def test_the_bar_stays_in_its_frame(status: Any, samples: int) -> None:
    html = status_html(replace(status, samples=samples), RunHeader("digits"))
    assert f'aria-valuenow="{100 if samples else 0}"' in html


@pytest.mark.parametrize("state", list(RunState))
def test_buttons_follow_the_state(scene: Any, state: RunState) -> None:
    panel = run_panel()
    scene.snapshot_epoch = 10
    scene.set(state=state)
    panel.update(DashboardState.of(scene), "")
    enabled = {name for name, button in panel.buttons.items() if not button.disabled}
    assert enabled == ENABLED[state.value]


def test_every_state_is_known_to_the_buttons() -> None:
    assert set(ENABLED) == {state.value for state in RunState}


def test_buttons_call_what_they_stand_for() -> None:
    pressed: list[str] = []
    panel = run_panel(pressed=pressed)
    for button in panel.buttons.values():
        button.click()
    assert pressed == list(BUTTONS)


def test_errors_are_shown_in_words_and_go_away(scene: Any) -> None:
    panel = run_panel()
    scene.set(state=RunState.FAILED, error="RuntimeError: " + EVIL)
    panel.update(DashboardState.of(scene), "and the dashboard has one too")
    shown = panel._message
    assert "hivenb-message wrong" in shown.value
    assert "<script" not in shown.value
    assert "and the dashboard has one too" in shown.value
    scene.set(state=RunState.READY, error=None)
    panel.update(DashboardState.of(scene), "")
    assert shown.value == ""


def test_the_invite_is_text_and_nothing_else() -> None:
    html = invite_html(EVIL)
    assert "<script" not in html
    assert "<img" not in html
    assert html.count("<input") == html.count("<button") == 1
    assert invite_html("") == ""


def test_peers_are_a_table_that_marks_this_one_and_greys_those_out_that_have_gone(scene: Any, members: Any) -> None:
    panel = PeersPanel(lambda count: None)
    scene.members = members
    panel.update(DashboardState.of(scene))
    html = panel._table.value
    assert words_of(html) == (
        "peer epoch speed share samples here since last seen "
        "…lf0001 this peer 14 130 samples/s 25 % 5,000 2 min ago just now "
        "Ann …her002 only outwards 14 282 samples/s 75 % 15,000 \N{EN DASH} gone (15 s ago)"
    )
    assert "12D3KooWself0001" in html, "the whole id is in the tooltip"
    assert [row.split("<td")[0] for row in html.split("<tr")[2:]] == [">", ' class="absent">']


def test_a_peer_on_this_machine_is_named_so(members: Any) -> None:
    assert "local 3" in peers_html(members, {members[1].peer.peer_id: 3})


@pytest.mark.parametrize("reach", list(Reach))
def test_how_a_peer_is_connected_is_said_in_words(members: Any, reach: Reach) -> None:
    html = peers_html([replace(members[1], route=reach, name="")])
    assert re.findall(r">([^<>]*)</span>", html.split("<td>")[1]) == [reach.value] * bool(reach.value)
    local = peers_html([replace(members[1], route=reach)], {members[1].peer.peer_id: 3})
    assert "local 3</span></td>" in local, "nobody asks how peers of one machine are connected"


def test_no_peers_says_what_to_do_and_many_are_cut(members: Any) -> None:
    assert "swarm.add_local_peers(2, run)" in peers_html(())
    many = peers_html([members[0]] * (MAX_ROWS + 5))
    assert many.count("<tr>") == MAX_ROWS + 1
    assert "and 5 more peers" in many


def test_a_peers_id_and_its_name_never_become_html(members: Any) -> None:
    first = replace(members[0].peer, peer_id=EVIL)
    html = peers_html([replace(members[0], peer=first, name=EVIL), replace(members[1], name="<b>x</b>")])
    assert "<script" not in html
    assert "<img" not in html
    assert "<b>x" not in html


def test_a_long_name_can_be_read_where_the_table_cuts_it(members: Any) -> None:
    name = "the third notebook of the group that meets on Tuesdays"
    assert f'class="name" title="{name}">{name}<' in peers_html([replace(members[0], name=name)])


def test_peers_that_die_are_started_again_if_asked_to(scene: Any) -> None:
    asked: list[bool] = []
    panel = PeersPanel(lambda count: None, asked.append)
    panel.restart.value = True
    panel.restart.value = False
    assert asked == [True, False]
    panel.close()
    assert panel.restart.disabled


def test_whether_they_are_started_again_is_shown_wherever_it_was_said(scene: Any) -> None:
    asked: list[bool] = []
    panel, now = PeersPanel(lambda count: None, asked.append), DashboardState.of(scene)
    for restarts in (True, False):
        panel.update(replace(now, local=LocalPeersNow(LocalCount(there=0, wanted=0, restarts=restarts))))
        assert panel.restart.value is restarts
    assert asked == []


def test_the_slider_asks_for_peers_and_follows_what_code_does(scene: Any) -> None:
    asked: list[int] = []
    panel = PeersPanel(asked.append)
    now = DashboardState.of(scene)
    panel.update(now)
    panel.slider.value = 3
    assert asked == [3]
    panel.update(replace(now, local=LocalPeersNow(LocalCount(there=1, wanted=3))))
    assert (panel.slider.value, asked) == (3, [3])
    assert words_of(panel._remark.value).startswith("peer 2 of 3: its process starts")
    panel.update(replace(now, local=LocalPeersNow(LocalCount(there=3, wanted=3))))
    assert words_of(panel._remark.value) == "ready; training begins with the run"
    panel.update(replace(now, local=LocalPeersNow(LocalCount(there=12, wanted=12))))
    assert (panel.slider.value, panel.slider.max, asked) == (12, 12, [3]), "what code added is shown, not asked for"
    panel.update(replace(now, local=LocalPeersNow(LocalCount(there=12, wanted=2))))
    assert words_of(panel._remark.value) == "removing 10 peers …"
    panel.update(replace(now, local=LocalPeersNow(LocalCount(there=0, wanted=0, error="LocalPeerError: <no> room"))))
    assert (panel.slider.value, asked) == (0, [3])
    assert "&lt;no&gt; room" in panel._trouble.value
    panel.update(now)
    assert panel._trouble.layout.display == "none"


def test_each_stage_of_a_peer_on_this_machine_is_said_until_it_trains(scene: Any, members: Any) -> None:
    now = DashboardState.of(scene)
    now = replace(now, status=replace(now.status, state=RunState.TRAINING))

    def said(states: dict[int, str], **what: Any) -> str:
        local = LocalPeersNow(LocalCount(there=1, wanted=1), states, {members[1].peer.peer_id: 4})
        return words_of(local_html(replace(now, local=local, **what)))

    assert said({4: "ready"}).startswith("local 4: in the swarm, and waits")
    assert said({4: "training"}).startswith("local 4: in the swarm; downloads the parameters")
    assert said({4: "training"}, members=members) == ""
    assert said({3: "failed", 4: "training"}, members=members) == ""


def test_the_log_is_escaped_and_bounded(scene: Any) -> None:
    panel = LogPanel()
    panel.update(DashboardState.of(scene))
    assert "nothing logged yet" in panel.widget.value
    scene.log_lines = (*(f"line {i}" for i in range(5000)), "x" * 10_000, EVIL)
    panel.update(DashboardState.of(scene))
    assert "<script" not in panel.widget.value
    assert "line 4999" in panel.widget.value
    assert panel.widget.value.index("line 4999") < panel.widget.value.index("line 4998"), "the newest is read first"
    assert "line 1\n" not in panel.widget.value
    assert len(log_html(["y" * 9000] * 9000)) < 60_000


def test_the_code_is_that_of_the_options(scene: Any) -> None:
    panel = CodePanel()
    panel.update(DashboardState.of(scene))
    assert "target_batch_size=2048" in panel.widget.value


def test_what_is_on_as_needed_is_shown_as_it_is(scene: Any) -> None:
    panel = OptionsPanel(lambda name, value: None)
    panel.update(DashboardState.of(scene))
    assert panel.controls["offload_optimizer"].value is False
    scene.options = scene.options.replace(delay_state_averaging=True, delay_optimizer_step=True)
    panel.update(DashboardState.of(scene))
    assert panel.controls["offload_optimizer"].value is True


def test_options_are_shown_in_words_with_the_name_in_the_tooltip(scene: Any) -> None:
    panel = OptionsPanel(lambda name, value: None)
    scene.options = scene.options.with_prerequisites(delay_grad_averaging=True, grad_compression="float16")
    panel.update(DashboardState.of(scene))
    assert {name: control.value for name, control in panel.controls.items()} == {
        "delay_state_averaging": True,
        "delay_optimizer_step": True,
        "delay_grad_averaging": True,
        "delay_compensation": True,
        "offload_optimizer": True,
        "reuse_grad_buffers": False,
        "grad_compression": "float16",
        "state_averaging_compression": "none",
        "load_state_compression": "none",
        "target_batch_size": "2048",
        "average_state_every": "1",
        "grad_averager_factory": "none",
        "average_buffers": True,
        "frozen_parameters": "compare",
        "use_local_updates": False,
        "outer_optimizer": "none",
        "auto_roll_back": False,
        "matchmaking_time": "5",
        "averaging_timeout": "30",
        "allreduce_timeout": "",
        "next_chunk_timeout": "",
        "robust_aggregation": "norm_bound",
        "outer_fragments": "1",
        "load_state_timeout": "600",
        "shutdown_timeout": "5",
        "performance_ema_alpha": "0.1",
        "snapshot_every": "10",
        "client_mode": False,
        "auxiliary": False,
        "verbose": False,
    }
    for name, control in panel.controls.items():
        assert control.description.startswith(FIELDS[name].label)
        # of ipywidgets 8, or 7
        assert f"({name})" in (control.tooltip if hasattr(control, "tooltip") else control.description_tooltip)
    assert [name for names in shown().values() for name in names] == list(panel.controls)


def test_showing_options_is_not_taken_for_a_person_who_changes_them(scene: Any) -> None:
    changes: list[tuple[str, Any]] = []
    panel = OptionsPanel(lambda name, value: changes.append((name, value)))
    scene.options = scene.options.replace(offload_optimizer=True)
    panel.update(DashboardState.of(scene))
    assert changes == []
    panel.controls["offload_optimizer"].value = False
    panel.controls["grad_compression"].value = "float16"
    assert changes == [("offload_optimizer", False), ("grad_compression", "float16")]
    panel.update(DashboardState.of(scene))
    assert panel.controls["offload_optimizer"].value is True, "what was not applied is taken back"


def test_a_number_that_is_taken_away_is_none_where_it_need_not_be_given(scene: Any) -> None:
    changes: list[tuple[str, Any]] = []
    panel = OptionsPanel(lambda name, value: changes.append((name, value)))
    scene.options = scene.options.replace(next_chunk_timeout=3.0)
    panel.update(DashboardState.of(scene))
    assert panel.controls["next_chunk_timeout"].value == "3"
    panel.controls["next_chunk_timeout"].value = ""
    assert changes == [("next_chunk_timeout", None)]


def test_each_codec_says_what_it_makes_of_this_model_and_the_panel_what_an_epoch_sends(scene: Any) -> None:
    panel = OptionsPanel(lambda name, value: None, tensor_shapes(scene.model))
    labels = [label for label, _ in panel.controls["grad_compression"].options]
    assert labels[:2] == ["1.0 MB: none", "500 kB: 16 bits"]
    panel.update(DashboardState.of(scene))
    assert words_of(panel._traffic.value) == (
        "Each of 3 peers sends about 1.3 MB of gradients and 1.3 MB of parameters a swarm epoch, and receives as much."
    )
    scene.set(num_peers=0)
    scene.options = scene.options.replace(use_local_updates=True, average_state_every=4)
    panel.update(DashboardState.of(scene))
    assert words_of(panel._traffic.value) == (
        "With a second peer, each sends about 1.0 MB of parameters every 4 swarm epochs, and receives as much."
    )


def test_what_options_cost_is_noted_beside_them(scene: Any) -> None:
    panel = OptionsPanel(lambda name, value: None)
    panel.update(DashboardState.of(scene))
    assert (panel._notes.value, panel._notes.layout.display) == ("", "none")
    scene.options = scene.options.with_prerequisites(delay_grad_averaging=True, delay_compensation=False)
    panel.update(DashboardState.of(scene))
    assert words_of(panel._notes.value) == scene.options.notes[0]
    assert panel._notes.layout.display == "block"
    scene.options = scene.options.replace(delay_compensation=True)
    panel.update(DashboardState.of(scene))
    assert (panel._notes.value, panel._notes.layout.display) == ("", "none")


def test_a_codec_of_ones_own_is_shown_as_such(scene: Any) -> None:
    from hivemind.compression import RoleAdaptiveCompression

    changes: list[tuple[str, Any]] = []
    panel = OptionsPanel(lambda name, value: changes.append((name, value)))
    scene.options = scene.options.replace(grad_compression=RoleAdaptiveCompression())
    panel.update(DashboardState.of(scene))
    assert panel.controls["grad_compression"].value == "an object of your own"
    scene.options = scene.options.replace(grad_compression="float16", state_averaging_compression="float16")
    panel.update(DashboardState.of(scene))
    assert panel.controls["grad_compression"].value == "float16"
    scene.options = scene.options.replace(state_averaging_compression=RoleAdaptiveCompression())
    panel.update(DashboardState.of(scene))
    assert panel.controls["state_averaging_compression"].value == "an object of your own"
    assert changes == []


def test_power_sgd_is_chosen_by_its_rank(scene: Any) -> None:
    changes: list[tuple[str, Any]] = []
    panel = OptionsPanel(lambda name, value: changes.append((name, value)), ((100, 1000), (10,)))
    menu = panel.controls["grad_averager_factory"]
    assert [label for label, _ in menu.options] == [
        "all-reduce",
        "1.1 %: PowerSGD, rank 1",
        "4.4 %: PowerSGD, rank 4",
        "35 %: PowerSGD, rank 32",
    ]
    panel.update(DashboardState.of(scene))
    menu.value = "power_sgd_4"
    ((name, factory),) = changes
    scene.options = scene.options.replace(grad_averager_factory=factory)
    panel.update(DashboardState.of(scene))
    assert (name, menu.value, len(changes)) == ("grad_averager_factory", "power_sgd_4", 1)
    assert "sends about 24 kB of gradients and 533 kB of parameters" in words_of(panel._traffic.value)
    scene.options = scene.options.replace(grad_averager_factory=PowerSGD(4, 0.1).factory())
    panel.update(DashboardState.of(scene))
    assert menu.value == "an object of your own"
    menu.value = "none"
    assert changes[1:] == [("grad_averager_factory", None)]


@pytest.mark.parametrize(
    ("shapes", "label"), [((), "P"), (((10,),), "100 %: P"), (((99, 101),), "8.0 %: P"), (((80, 80),), "10 %: P")]
)
def test_what_power_sgd_sends_is_said_in_few_digits(shapes: tuple[tuple[int, ...], ...], label: str) -> None:
    panel = OptionsPanel(lambda name, value: None, shapes)
    labels = {key: text for text, key in panel.controls["grad_averager_factory"].options}
    assert labels["power_sgd_4"].startswith(label)


def test_what_all_peers_have_to_agree_on_can_be_changed_by_the_host_alone(scene: Any) -> None:
    panel = OptionsPanel(lambda name, value: None)
    shared = [name for name, control in panel.controls.items() if FIELDS[name].swarm_wide]
    assert shared == [
        *shown()["all peers"],
        "robust_aggregation",
        "outer_fragments",
        "auto_roll_back",
        "average_buffers",
    ]
    scene.not_host_reason = "the host of the run decides on them for all peers (peer …abc123)"
    panel.update(DashboardState.of(scene))
    assert [name for name, control in panel.controls.items() if control.disabled] == shared
    assert "Not to be changed here: the host of the run" in words_of(panel._locked.value)
    scene.pending_options = scene.options.replace(target_batch_size=96, grad_compression="float16")
    panel.update(DashboardState.of(scene))
    assert waiting(DashboardState.of(scene).options) == (
        "At the next batch: gradients. At one of the next swarm epochs, at all peers: target batch size."
    )
    scene.pending_epoch = 1017
    panel.update(DashboardState.of(scene))
    assert "At swarm epoch 1,017, at all peers: target batch size." in waiting(DashboardState.of(scene).options)
    scene.not_host_reason = None
    panel.update(DashboardState.of(scene))
    assert not any(control.disabled for control in panel.controls.values())
    assert panel._locked.layout.display == "none"


def test_what_is_not_in_force_yet_is_shown_and_said(scene: Any) -> None:
    changes: list[Any] = []
    panel = OptionsPanel(lambda *change: changes.append(change))
    scene.set(state=RunState.TRAINING)
    scene.pending_options = scene.options.replace(grad_compression="float16", target_batch_size=99)
    panel.update(DashboardState.of(scene))
    assert not any(control.disabled for control in panel.controls.values())
    assert panel.controls["grad_compression"].value == "float16"
    assert panel.controls["target_batch_size"].value == "99"
    assert waiting(DashboardState.of(scene).options).endswith("at all peers: target batch size.")
    scene.options, scene.pending_options = scene.pending_options, None
    panel.update(DashboardState.of(scene))
    assert waiting(DashboardState.of(scene).options) == ""
    assert not changes


@pytest.mark.parametrize(
    ("name", "written", "read"),
    [
        ("target_batch_size", "512", 512),
        ("matchmaking_time", "2.5", 2.5),
        ("target_batch_size", "many", "many"),
        ("target_batch_size", "1.5", "1.5"),
        ("target_batch_size", " ", " "),
        ("shutdown_timeout", " ", " "),
        ("allreduce_timeout", "2", 2.0),
    ],
)
def test_numbers_are_read_and_what_is_none_is_left_to_the_check(scene: Any, name: str, written: str, read: Any) -> None:
    changes: list[tuple[str, Any]] = []
    panel = OptionsPanel(lambda name, value: changes.append((name, value)))
    panel.update(DashboardState.of(scene))
    panel.controls[name].value = written
    assert changes == [(name, read)]


def test_a_wrong_value_is_marked_at_its_field_and_stays_to_be_corrected(scene: Any) -> None:
    panel = OptionsPanel(lambda name, value: None)
    panel.update(DashboardState.of(scene))
    panel.controls["target_batch_size"].value = "-1"
    panel.mark_wrong("target_batch_size", "give at least <1>")
    panel.update(DashboardState.of(scene))
    assert panel.controls["target_batch_size"].value == "-1"
    assert "give at least &lt;1&gt;" in panel._wrong["target_batch_size"].value
    panel.mark_wrong("target_batch_size", "")
    panel.update(DashboardState.of(scene))
    assert panel.controls["target_batch_size"].value == "2048"
    assert panel._wrong["target_batch_size"].layout.display == "none"


def test_what_was_switched_together_is_said() -> None:
    before = Options(target_batch_size=1)
    after = before.with_prerequisites(delay_optimizer_step=True)
    assert together(before, after, "delay_optimizer_step") == (
        "Also switched on: state averaging in background, optimizer in main memory."
    )
    back = after.with_prerequisites(offload_optimizer=False)
    assert together(after, back, "offload_optimizer") == "Also switched off: optimizer step in background."
    assert together(before, before.replace(offload_optimizer=True), "offload_optimizer") == ""
