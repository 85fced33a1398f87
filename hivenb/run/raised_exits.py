"""What is to end a program, such as ``sys.exit()``, ends a run as an error when it is raised where that trains."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hivenb.errors import TrainingError


class EndsInError:
    """A launcher of Lightning's, by which its Trainer calls what it does on the thread that called it.

    Of an interrupt, Lightning believes that a person has pressed Ctrl-C: it sets a signal handler, which only the main
    thread can, and exits. The Trainer would not be torn down. Others would end the cell, or the kernel, that waits.
    """

    is_interactive_compatible = True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call a function.

        :raises TrainingError: if it raises what is no ``Exception``
        """
        try:
            return function(*args, **kwargs)
        except Exception:
            raise
        except BaseException as e:
            raise TrainingError(in_words(e)) from e


def in_words(error: BaseException) -> str:
    """What was raised, where, and what to do."""
    name = type(error).__name__
    said = f"{name}({error})" if str(error) else name
    frames = traceback.extract_tb(error.__traceback__)
    where = f", in {frames[-1].name} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return (
        f"{said} was raised where the model is trained{where}, which ends the run as any error does. To end training "
        "from there, set trainer.should_stop = True; from elsewhere, run.stop(). run.start() goes on from here"
    )
