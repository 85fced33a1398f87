from __future__ import annotations

import socket
import subprocess
import sys

import psutil
import pytest
import tiny
from hivemind.utils import get_dht_time

import hivenb
from hivenb.engine.network.addresses import Reach
from hivenb.engine.network.daemon import TiedP2P
from hivenb.errors import InviteError, PlatformError, SwarmError
from hivenb.options import Options
from hivenb.swarm import PeerInfo
from hivenb.training import TrainingRun

#: The id of a peer that does not exist.
NOBODY = "12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X"


@pytest.fixture(scope="module")
def home():
    with hivenb.Swarm("home", private=False) as swarm:
        yield swarm


@pytest.fixture
def socket_folder(tmp_path, monkeypatch):
    """Where sockets are, instead of in /tmp, where those of others are."""
    monkeypatch.setattr(TiedP2P, "_UNIX_SOCKET_PREFIX", f"/unix{tmp_path}/")
    return tmp_path


def test_a_cell_that_is_run_again_gives_the_same_swarm(home):
    assert hivenb.Swarm("home", private=False) is home
    assert hivenb.Swarm.get("home") is home
    assert hivenb.Swarm("home", private=False, public=False, host_maddrs=[]) is home


@pytest.mark.process
@pytest.mark.parametrize(("public", "times"), [(True, 1), (False, 0)])
def test_who_opens_one_where_nobody_can_connect_is_told(monkeypatch, recwarn, public, times):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    with hivenb.Swarm("walled", public=public) as swarm:
        assert swarm.dht.reach is Reach.UNKNOWN
    said = [one for one in recwarn if "nobody can join by the invite of this swarm" in str(one.message)]
    assert [one.filename for one in said] == [__file__] * times


def test_other_settings_for_an_open_swarm_are_refused_and_named(home):
    with pytest.raises(SwarmError, match=r"'home' is open already, with client_mode=None instead of True.*close"):
        hivenb.Swarm("home", private=False, client_mode=True)
    with pytest.raises(SwarmError, match="with private=False instead of True"):
        hivenb.Swarm("home")
    assert home.is_open
    assert hivenb.Swarm("home", private=False) is home


def test_a_name_that_is_not_open_is_refused_with_those_that_are(home):
    with pytest.raises(SwarmError, match=r"no swarm named 'hom' is open; open ones: .*'home'"):
        hivenb.Swarm.get("hom")


@pytest.mark.parametrize(
    "name", ["hivenb://eNqSecret", " see hivenb://eNqSecret", f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}", "/dns4/x"]
)
@pytest.mark.parametrize("use", [hivenb.Swarm, hivenb.Swarm.get])
def test_an_invite_is_no_name_and_is_not_shown(name, use):
    with pytest.raises(SwarmError, match=r"is an (invite|address), .* hivenb\.Swarm\.join\(\.\.\.\)") as caught:
        use(name)
    assert name.strip() not in str(caught.value)


def test_a_setting_that_does_not_exist_is_a_clear_error(home):
    with pytest.raises(TypeError, match=r"Swarm.*pubic"):
        hivenb.Swarm("home", pubic=True)


def test_representation_is_the_same_each_time(home):
    assert repr(home) == "Swarm('home', open, this machine only, anybody can join)"
    with hivenb.Swarm("elsewhere") as other:
        pass
    assert repr(other) == "Swarm('elsewhere', closed)"


def test_after_close_it_says_so_and_the_name_is_free_again(swarm):
    name, before = swarm.name, swarm.peer_id
    swarm.close()
    swarm.close()
    assert not swarm.is_open
    for use in (lambda: swarm.addresses, lambda: swarm.invite, swarm.peers):
        with pytest.raises(SwarmError, match=f"'{name}' is closed; open one"):
            use()
    with pytest.raises(SwarmError):
        hivenb.Swarm.get(name)
    with hivenb.Swarm(name) as again:
        assert again is not swarm
        assert again.peer_id != before
        swarm.close()  # the old one
        assert hivenb.Swarm.get(name) is again


@pytest.mark.process
def test_nothing_is_left_after_close(socket_folder):
    processes = set(psutil.Process().children(recursive=True))
    with hivenb.Swarm("short") as swarm:
        run = TrainingRun(
            tiny.TinyModel(), tiny.loader(), swarm=swarm, options=Options(target_batch_size=32), accelerator="cpu"
        )
        run.start()
        run.wait(epochs=1, timeout=60)
        assert list(socket_folder.iterdir())
    assert list(socket_folder.iterdir()) == []
    left = [p for p in psutil.Process().children(recursive=True) if p not in processes]
    assert [p for p in left if "multiprocessing.resource_tracker" not in " ".join(p.cmdline())] == []


def test_a_swarm_whose_daemon_died_can_be_opened_anew(swarm, eventually):
    swarm.dht.kill()
    eventually(lambda: not swarm.is_open)
    with pytest.raises(SwarmError, match=r"process of the swarm .* has ended"):
        swarm.peers()
    with hivenb.Swarm(swarm.name) as again:
        assert again is not swarm
        assert again.peers() == ()


@pytest.mark.parametrize("lead", ["invite", "addresses", "text"])
def test_join_by_invite_or_by_addresses(home, lead):
    where = {"invite": f" {home.invite[:20]}\n{home.invite[20:]} ", "addresses": list(home.addresses)}.get(
        lead, ", ".join(home.addresses)
    )
    with hivenb.Swarm.join(where, "guest") as guest:
        assert hivenb.Swarm.join(home.invite, "guest") is guest
        assert guest.peer_id != home.peer_id
        home.dht.store("greeting", "hello", expiration_time=get_dht_time() + 60)
        assert guest.dht.get("greeting", latest=True).value == "hello"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda invite: invite[:-12], "damaged.*copy it once more"),
        (lambda invite: invite.replace("hivenb://", "hivenb:"), "is not the address of a peer"),
        (lambda invite: "hivenb://", "damaged"),
        (lambda invite: "", "is not the address of a peer"),
        (lambda invite: "hello", "is not the address of a peer"),
        (lambda invite: "/ip4/127.0.0.1/tcp/4000", "does not say whose it is"),
        (lambda invite: f"/ip4/127.0.0.1/tcp/x/p2p/{NOBODY}", "is not the address of a peer"),
        (lambda invite: [], "is not the address of a peer"),
    ],
)
def test_a_damaged_invite_is_refused_before_anything_starts(home, spoil, words):
    with pytest.raises(InviteError, match=words):
        hivenb.Swarm.join(spoil(home.invite), "guest")
    with pytest.raises(SwarmError):
        hivenb.Swarm.get("guest")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.timeout(60)
def test_a_peer_that_does_not_answer_is_a_clear_error_and_the_corrected_call_works(home):
    nowhere = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{NOBODY}"
    with pytest.raises(SwarmError, match=r"none of the peers answers.*still open there"):
        hivenb.Swarm.join(nowhere, "guest")
    with hivenb.Swarm.join(home.invite, "guest") as guest:
        assert guest.is_open


@pytest.mark.timeout(60)
def test_a_port_in_use_is_a_clear_error_and_the_corrected_call_works(home):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = f"/ip4/127.0.0.1/tcp/{holder.getsockname()[1]}"
        with pytest.raises(SwarmError, match=r"the port is in use.*/tcp/0.*" + taken):
            hivenb.Swarm("guest", host_maddrs=[taken])
    with hivenb.Swarm("guest", host_maddrs=[taken]) as guest:
        assert guest.addresses[0].startswith(taken)


def test_peers_tells_who_trains(swarm, eventually):
    options = Options(target_batch_size=64, run_id="who")
    run = TrainingRun(tiny.TinyModel(), tiny.loader(), swarm=swarm, options=options, accelerator="cpu")
    assert swarm.peers() == ()
    run.start()
    run.wait(epochs=2, timeout=60)
    eventually(lambda: any(p.epoch >= 2 for p in swarm.peers()))
    (myself,) = swarm.peers()
    assert isinstance(myself, PeerInfo)
    assert (myself.peer_id, myself.is_self, myself.client_mode) == (swarm.peer_id, True, False)
    assert myself.samples >= 0
    assert myself.samples_per_second > 0
    assert 0 <= myself.age < 30
    assert swarm.peers("another run") == ()
    with hivenb.Swarm.join(swarm.invite, "watcher") as watcher:
        (seen,) = watcher.peers("who")
        assert (seen.peer_id, seen.is_self) == (swarm.peer_id, False)


@pytest.mark.process
def test_an_identity_keeps_the_peer_id(tmp_path):
    path = tmp_path / "identity"
    ids = []
    for _ in range(2):
        with hivenb.Swarm("myself", identity_path=path) as swarm:
            ids.append(swarm.peer_id)
            assert swarm.addresses[0].endswith(swarm.peer_id)
    assert ids[0] == ids[1]


@pytest.mark.process
@pytest.mark.timeout(60)
def test_an_identity_that_cannot_be_written_is_a_clear_error(tmp_path):
    with pytest.raises(SwarmError, match="identity"):
        hivenb.Swarm("myself", identity_path=tmp_path / "missing" / "identity")


def test_elsewhere_than_on_linux_a_swarm_says_what_to_do(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(PlatformError, match=r"Linux only.*WSL 2"):
        hivenb.Swarm("windows")


@pytest.mark.process
def test_a_public_swarm_listens_on_the_network():
    with hivenb.Swarm("public", public=True) as swarm:
        assert repr(swarm) == "Swarm('public', open, public, invited only)"
        if any(not address.startswith("/ip4/127.") for address in swarm.addresses):
            assert all("/127.0.0.1/" not in address for address in swarm.addresses)


ENDS = """
import sys, hivenb, tiny
from hivemind.utils import get_dht_time
from hivenb.training import TrainingRun
from hivenb.engine.network.daemon import TiedP2P
TiedP2P._UNIX_SOCKET_PREFIX = "/unix" + sys.argv[2] + "/sockets-"
def main():
    swarm = hivenb.Swarm()
    run = TrainingRun(tiny.TinyModel(), tiny.loader(), swarm=swarm, accelerator="cpu",
                      options=hivenb.Options(target_batch_size=32))
    run.start()
    assert run.wait(epochs=1, timeout=60)
    if "paused" in sys.argv:
        run.pause()
    if "error" in sys.argv:
        raise ValueError("the script's own")
    print("done", flush=True)
if __name__ == "__main__":
    main()
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("how", ["paused", "error"])
def test_a_script_that_ends_without_closing_ends_at_once(how, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ENDS)
    environment = {"PYTHONPATH": ":".join(sys.path), "TMPDIR": str(tmp_path), "PATH": ""}
    command = [sys.executable, str(script), how, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)
    if how == "error":
        assert done.returncode == 1
        assert done.stderr.rstrip().endswith("ValueError: the script's own")
        assert done.stderr.count("Traceback") == 1
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert [*tmp_path.glob("hivenb-*"), *tmp_path.glob("sockets-*")] == []
