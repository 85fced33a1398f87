"""What Tab and Shift-Tab in a notebook show of public names."""

from __future__ import annotations

import inspect

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import hivenb
from hivenb.errors import OptionsError
from hivenb.options import FIELD_NAMES

#: What has the keywords of which call, by the beginning of a cell.
OF_A_SWARM = {"name", "public", "secret", "host_maddrs", "client_mode", "startup_timeout"}
OPTIONS = set(FIELD_NAMES)
OF_A_TRAINER = {"accelerator", "callbacks", "max_epochs", "precision"}
CALLS = {
    "hivenb.Options(": OPTIONS,
    "options.replace(": OPTIONS,
    "hivenb.Swarm(": OF_A_SWARM | {"initial_peers"},
    "hivenb.Swarm.join(": OF_A_SWARM | {"invite"},
    "hivenb.HivemindStrategy(": OPTIONS | {"dht", "host_maddrs", "initial_peers"},
    "hivenb.TrainingRun(": {"model", "data", "swarm", "options"} | OF_A_TRAINER,
    "run.apply(": OPTIONS | {"options", "wait"},
    "hivenb.compare(": {"model", "epochs", "local_peers"} | OF_A_TRAINER,
}


class Run(hivenb.TrainingRun):
    """Enough of a run for its methods to be looked at."""

    def __init__(self) -> None: ...


@pytest.fixture(params=[False, True], ids=["plain", "jedi"])
def shell(request: pytest.FixtureRequest) -> InteractiveShell:
    shell = InteractiveShell()
    shell.Completer.use_jedi = request.param
    shell.user_ns |= {"hivenb": hivenb, "run": Run(), "options": hivenb.Options(target_batch_size=8)}
    return shell


def completed(shell: InteractiveShell, text: str) -> list[str]:
    with provisionalcompleter():
        return [one.text.removeprefix(".") for one in shell.Completer.completions(text, len(text))]


@pytest.mark.parametrize("text", CALLS)
def test_tab_completes_keywords(shell: InteractiveShell, text: str) -> None:
    named = {one.removesuffix("=") for one in completed(shell, text) if one.endswith("=")}
    assert named >= CALLS[text]
    assert named.isdisjoint({"self", "cls", "values", "changes", "settings"})


def test_tab_lists_public_names_alone(shell: InteractiveShell) -> None:
    assert {name for name in completed(shell, "hivenb.") if not name.startswith("_")} == set(hivenb.__all__) - {
        "__version__"
    }


@pytest.mark.parametrize("name", sorted(set(hivenb.__all__) - {"__version__", "HivenbError"}))
def test_signatures_name_what_there_is(name: str) -> None:
    kinds = [one.kind for one in inspect.signature(getattr(hivenb, name)).parameters.values()]
    assert inspect.Parameter.VAR_POSITIONAL not in kinds
    assert inspect.Parameter.VAR_KEYWORD not in kinds or name == "HivemindStrategy", "which hands further ones on"


def test_signatures_have_defaults_that_count() -> None:
    assert inspect.signature(hivenb.Options).parameters["target_batch_size"].default is inspect.Parameter.empty
    assert inspect.signature(hivenb.Options).parameters["matchmaking_time"].default == 5.0
    assert inspect.signature(hivenb.TrainingRun).parameters["max_epochs"].default == -1
    assert "target_batch_size: 'int' = unchanged" in str(inspect.signature(hivenb.TrainingRun.apply))


def test_what_is_derived_has_its_own() -> None:
    assert list(inspect.signature(Run).parameters) == []


def test_a_wrong_keyword_is_still_told_of_with_what_there_is() -> None:
    with pytest.raises(OptionsError, match="No such option"):
        hivenb.Options(target_batch_siez=8)
    with pytest.raises(TypeError, match="no setting pubic"):
        hivenb.Swarm(pubic=True)
