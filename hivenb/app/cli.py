"""The command ``hivenb``: demo, lab, join, relay. Imports next to nothing itself, so that help is there at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from hivenb.app.loading import INTERRUPTED, loading, say_interrupted
from hivenb.errors import HivenbError
from hivenb.view.terminal import Terminal

_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"

TASKS = ("digits", "text")

DESCRIPTION = """\
Train one model together, across machines that come and go.

  hivenb demo            see it work: this process and two more peers train for a minute
  hivenb lab             the same in a notebook, with switches and live charts
  hivenb join INVITE     take part in a swarm that somebody has invited you to
  hivenb relay           let peers meet on this machine, whom firewalls keep apart
"""

DEMO = """\
Trains a small model on real data, as the first of a swarm of peers on this machine, and shows how it goes.
At the end: a table, a picture, and the accuracy of the model on data that no peer has trained on.

A swarm epoch is one optimizer step, made once all peers together have processed enough samples.
Others may join meanwhile, with the line that is shown at the start.
"""

JOIN = """\
Joins a swarm with one more peer, which trains one of hivenb's own tasks on data of its own shuffle. The invite is
what `hivenb demo` shows at the start, or `swarm.invite` in a notebook that trains the same task; a model of your
own joins in a notebook or a script. The peer first downloads the state of the model from the others.
Ctrl-C leaves the swarm; the others go on.

Nobody can join without the invite. A swarm is there for its own machine only, unless it was opened with --public.
"""

RELAY = """\
Opens a swarm on a machine that others can reach, and shows its invite. Those who join by it meet here, and whoever is
behind a firewall is reached through this machine, which needs no GPU, trains nothing, and passes on what they send.
Only members are served. Ctrl-C ends it; started again with the same folder, it is the same relay.
"""

LAB = """\
Opens JupyterLab with the quickstart notebook, in the current directory. There it is yours: it is written only if
there is none yet. In a checkout of the source, the notebook of the checkout is opened instead.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    :param argv: its arguments; by default those of this process
    :returns: the exit code: 0, 1 after an error, 130 when interrupted
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "command"):
        parser.print_help()
        return 0
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except KeyboardInterrupt:
        say_interrupted()
        return INTERRUPTED
    except HivenbError as error:
        if arguments.debug:
            raise
        sys.stderr.write(f"\nhivenb: {error}\n")
        return 1


def _demo(arguments: argparse.Namespace) -> int:
    from hivenb.app.demo import DemoSettings, run_demo

    settings = DemoSettings(
        task=arguments.task,
        peers=arguments.peers,
        epochs=arguments.epochs,
        accelerator=arguments.accelerator,
        public=arguments.public,
        json=arguments.json,
        png=arguments.png,
    )
    run_demo(settings, Terminal())
    return 0


def _join(arguments: argparse.Namespace) -> int:
    from hivenb.app.demo import run_join

    run_join(
        sys.stdin.readline() if arguments.invite == "-" else arguments.invite,
        arguments.task,
        arguments.epochs,
        arguments.accelerator,
        arguments.client,
        arguments.name,
        Terminal(),
    )
    return 0


def _lab(arguments: argparse.Namespace) -> int:
    from hivenb.app.lab import open_lab

    open_lab(arguments.browser, arguments.port, arguments.further, Terminal())
    return 0


def _relay(arguments: argparse.Namespace) -> int:
    with loading():
        from hivenb.app.relay import RelaySettings, run_relay

    folder = arguments.folder or Path.home() / ".local" / "share" / "hivenb" / "relay"
    run_relay(RelaySettings(folder, arguments.port, arguments.address), Terminal())
    return 0


# -- the arguments ------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hivenb", description=DESCRIPTION)
    parser.add_argument("--version", action=_Version, help="show the versions of hivenb and of what it runs on")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (_add_demo, _add_join, _add_lab, _add_relay):
        command = add(commands)
        command.add_argument("--debug", action="store_true", help="after an error, show where in the code it happened")
    return parser


def _add_demo(commands: _Commands) -> argparse.ArgumentParser:
    demo = commands.add_parser("demo", help="train with peers on this machine, for a minute", description=DEMO)
    _add_task(demo)
    demo.add_argument(
        "--peers", type=_whole(0), default=2, metavar="N", help="further peers on this machine (default: 2)"
    )
    demo.add_argument("--epochs", type=_whole(1), default=20, metavar="N", help="swarm epochs (default: 20)")
    demo.add_argument("--json", type=_file, metavar="FILE", help="write the figures to this file, as JSON")
    demo.add_argument(
        "--png",
        type=_file,
        default="hivenb-demo.png",
        metavar="FILE",
        help="where to put the picture (default: hivenb-demo.png in the current directory)",
    )
    demo.add_argument(
        "--public", action="store_true", help="let other machines join: listen on the network, not on this machine only"
    )
    demo.set_defaults(command=_demo)
    return demo


def _add_join(commands: _Commands) -> argparse.ArgumentParser:
    join = commands.add_parser("join", help="take part in a swarm", description=JOIN)
    join.add_argument("invite", metavar="INVITE", help="hivenb://... , the address of a peer, or - to read it")
    _add_task(join)
    join.add_argument(
        "--epochs", type=_whole(1), metavar="N", help="leave after so many swarm epochs (default: on Ctrl-C)"
    )
    join.add_argument(
        "--client",
        action="store_true",
        help="only connect to others; without it, it is found out whether they can connect to this machine",
    )
    join.add_argument("--name", metavar="NAME", help="what the others see beside your peer's id; nothing else uses it")
    join.set_defaults(command=_join)
    return join


def _add_lab(commands: _Commands) -> argparse.ArgumentParser:
    lab = commands.add_parser("lab", help="open the quickstart notebook in JupyterLab", description=LAB)
    lab.add_argument("--no-browser", dest="browser", action="store_false", help="only show the address to open")
    lab.add_argument("--port", type=_whole(1, 65535), metavar="N", help="port of JupyterLab (default: a free one)")
    lab.add_argument(
        "further", nargs="*", metavar="-- OPTION", help="further options of JupyterLab, such as -- --allow-root"
    )
    lab.set_defaults(command=_lab)
    return lab


def _add_relay(commands: _Commands) -> argparse.ArgumentParser:
    relay = commands.add_parser("relay", help="let peers meet here, whom firewalls keep apart", description=RELAY)
    relay.add_argument(
        "--port", type=_whole(1, 65535), default=31337, metavar="N", help="for TCP and UDP (default: 31337)"
    )
    relay.add_argument(
        "--address",
        default="",
        metavar="NAME",
        help="this machine's address or name to the others, where it cannot see it itself, as on many rented machines",
    )
    relay.add_argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help="for what makes it the same relay each time (default: ~/.local/share/hivenb/relay)",
    )
    relay.set_defaults(command=_relay)
    return relay


def _add_task(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--task",
        choices=TASKS,
        default=TASKS[0],
        help="digits: recognize handwritten digits; text: predict the next character of English (default: digits)",
    )
    parser.add_argument(
        "--accelerator",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="where to train (default: auto, a GPU if there is one)",
    )


class _Parser(argparse.ArgumentParser):
    """Keeps the lines of a description as they are written; its subcommands do, too."""

    def __init__(self, **kwargs: object):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **kwargs})  # type: ignore[arg-type]


class _Version(argparse.Action):
    """Looks versions up only when asked for."""

    def __init__(self, **kwargs: object):
        super().__init__(**{**kwargs, "nargs": 0, "default": argparse.SUPPRESS})  # type: ignore[arg-type]

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from hivenb.app.demo import versions

        own = versions()
        others = ", ".join(f"{name} {version}" for name, version in own.items() if name != "hivenb")
        sys.stdout.write(f"hivenb {own['hivenb']} ({others})\n")
        parser.exit()


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A reader of whole numbers within bounds."""

    def read(text: str) -> int:
        wanted = f"a whole number of at least {least}" + ("" if most is None else f" and at most {most}")
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{number} is not {wanted}")
        return number

    return read


def _file(text: str) -> Path:
    """A file that can be written; found out now, not after a minute of training."""
    path = Path(text)
    place = path if path.exists() else path.parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory; give the name of a file")
    if not place.exists():
        raise argparse.ArgumentTypeError(f"there is no directory {place}")
    if not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(f"{place} cannot be written; give a file elsewhere")
    return path
