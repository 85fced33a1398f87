"""The modes of a model stay those of its training, whatever a cell does with the model meanwhile.

A Trainer in a background thread invites people to look at predictions beside it, with the usual ``model.eval()``; the
rest of the training would go without dropout, and with BatchNorm's statistics frozen. So while a run trains, what the
training thread does with the model's modes is done, and what any other thread asks for is not.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hivenb.errors import TrainingError

logger = logging.getLogger(__name__)

#: Methods that change how a module computes, and that another thread's call of leaves as it is.
_KEPT = ("train", "requires_grad_", "freeze", "unfreeze")

#: The method by which a module's tensors are moved or cast, which another thread may not.
_MOVES = "_apply"

_COPY = "run.snapshot() gives a copy to predict with, in eval mode, with the weights of this moment"


class KeptModes:
    """Which modules of a model are in training mode while a run trains it.

    Costs nothing per batch but a look at two attributes: the methods of the model's modules are wrapped for as long as
    it is trained.

    :param say: called once with a few words, and from whichever thread that is, when something was asked for in vain
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._has_said = self._has_taken_back = False
        self._model: nn.Module | None = None
        self._thread: int | None = None
        self._is_handed_out = False
        self._guards: list[_Guard] = []
        #: as they were in training last
        self._flags: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._has_changed = False
        self._is_to_train = True
        self._trainer: Any = None
        self._kinds: list[tuple[Any, Any, Any]] = []

    # -- what the run says, on its training thread ---------------------------------------------------------------

    def begin(self, model: nn.Module) -> None:
        """Let the model be in training mode, as far as it was when it was trained last, and keep it there.

        Modules that are in eval mode in a model that is in training mode stay so: somebody wants them to.

        :param model: that the calling thread is about to train
        """
        self._model, self._thread, self._is_handed_out = model, threading.get_ident(), False
        self._has_said = self._has_taken_back = False
        self._to_training_mode("before the run was started")
        self._note()
        self._guards = [_Guard(self, module, name) for module in _modules(model) for name in (*_KEPT, _MOVES)]
        self._note_kinds()

    def see_trainer(self, trainer: Any) -> None:
        """Keep to a Trainer from now on, should another one take the model.

        :param trainer: as the model has it
        """
        self._trainer = trainer

    def before_batch(self) -> None:
        """Undo what others did to the model without any of its methods."""
        model = self._model
        if model is None:
            return
        if model.training:
            self._is_to_train = True
        elif self._is_to_train:
            self._restore()
            self._tell("eval mode")
        if self._has_changed:
            self._note()
        if self._put_trainer_back():
            self._has_taken_back = True
            self._tell("another Trainer")

    def hand_out(self) -> None:
        """Let other threads do what they like, while training waits at the gate."""
        self._is_handed_out = True

    def take_back(self) -> None:
        """Go on with the modes that there were, unless somebody has changed those of a part meanwhile."""
        self._is_handed_out = False
        self._to_training_mode("while it was paused")
        self._note()

    def end(self) -> None:
        """Let the model be anybody's again."""
        if self._model is not None and self._model.training:
            self._note()
        for guard in self._guards:
            guard.remove()
        self._guards, self._model, self._thread, self._trainer, self._kinds = [], None, None, None, []

    # -- what the guards ask -------------------------------------------------------------------------------------

    def is_of_another(self) -> bool:
        """Whether the calling thread is another than the one that trains."""
        return self._thread is not None and threading.get_ident() != self._thread

    @property
    def is_handed_out(self) -> bool:
        """Whether others may do what they like."""
        return self._is_handed_out

    def note_change(self, module: nn.Module, mode: bool | None) -> None:
        """The training thread has changed modes itself.

        :param mode: of the module from now on
        """
        self._has_changed = True
        if module is self._model and mode is not None:
            self._is_to_train = mode

    def refuse(self, module: nn.Module, asked: str) -> None:
        """Another thread has asked for something that is not done.

        :param asked: in a few words
        :raises TrainingError: if it is another Trainer
        """
        if self._put_trainer_back() or self._has_taken_back:  # before that Trainer has asked for a mode, perhaps
            self._has_taken_back = False
            raise TrainingError(
                f"another Trainer cannot use this {type(self._model).__name__} while a run trains it: give it a copy, "
                "run.snapshot(), or stop the run first"
            )
        self._tell(asked)

    def refuse_move(self, module: nn.Module) -> None:
        """Another thread wants to move or cast tensors of the model.

        :raises TrainingError: always
        """
        for one, device, dtype in self._kinds:  # Lightning's mixin notes what is to come before it is done
            one._device, one._dtype = device, dtype
        raise TrainingError(
            f"a run trains this {type(self._model).__name__}, whose tensors cannot be moved or cast meanwhile: "
            "run.snapshot(device=...) gives a copy where you want it; or stop the run first"
        )

    def note_move(self, module: nn.Module) -> None:
        """The training thread has moved or cast tensors itself."""
        if module is self._model:
            self._note_kinds()

    def _put_trainer_back(self) -> bool:
        """Let the model have the Trainer of the run.

        :returns: whether it had another one
        """
        model: Any = self._model
        if model is None or self._trainer is None or vars(model).get("_trainer") in (None, self._trainer):
            return False
        model.trainer = self._trainer
        return True

    # -- inside --------------------------------------------------------------------------------------------------

    def _to_training_mode(self, when: str) -> None:
        model = self._model
        if model is None or model.training:
            return
        if self._flags:
            self._restore()
        else:
            model.train()
        logger.info(
            f"the model was put into eval mode {when}, and is in training mode again, as it is trained. {_COPY}"
        )

    def _restore(self) -> None:
        for module in _modules(self._model):
            module.training = self._flags.get(module, True)

    def _note(self) -> None:
        self._has_changed = False
        self._flags = weakref.WeakKeyDictionary({module: module.training for module in _modules(self._model)})
        self._is_to_train = bool(self._model is not None and self._model.training)

    def _note_kinds(self) -> None:
        found = [one for one in _modules(self._model) if "_device" in vars(one) and "_dtype" in vars(one)]
        self._kinds = [(one, vars(one)["_device"], vars(one)["_dtype"]) for one in found]

    def _tell(self, asked: str) -> None:
        if self._has_said:
            return
        self._has_said = True
        self._say(f"{asked} was asked for beside training: the run keeps its modes")
        logger.info(
            f"a cell, or another thread, has asked for {asked} of the model while the run trains it. The run keeps its "
            f"modes, so this has changed nothing: {_COPY}"
        )


class _Guard:
    """A method of a module that is trained; in a copy of that module, it is the method itself.

    :param modes: of the run
    :param name: of the method, which the module need not have
    """

    def __init__(self, modes: KeptModes, module: nn.Module, name: str):
        self._modes, self._module, self._name = modes, module, name
        self._own = vars(module).get(name)
        self.__wrapped__: Any = getattr(module, name, None)
        if self.__wrapped__ is not None:
            vars(module)[name] = self  # past __setattr__, which compiled modules pass on

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modes = self._modes
        if not modes.is_of_another():
            result = self.__wrapped__(*args, **kwargs)
            if self._name == _MOVES:
                modes.note_move(self._module)
            elif self._name in ("train", "freeze", "unfreeze"):
                modes.note_change(self._module, self._module.training)
            return result
        if self._name == _MOVES:
            if _changes_tensors(self._module, args[0]):
                modes.refuse_move(self._module)
            return self._module
        if modes.is_handed_out:
            return self.__wrapped__(*args, **kwargs)
        if (asked := self._asked(*args, **kwargs)) is not None:
            modes.refuse(self._module, asked)
        return None if self._name in ("freeze", "unfreeze") else self._module

    def _asked(self, mode: bool = True) -> str | None:
        """What was asked for, in words; ``None`` if that is so already."""
        if self._name == "train":
            if mode:
                return None if self._module.training else "training mode"
            return "eval mode" if any(one.training for one in self._module.modules()) else None
        wanted = mode if self._name == "requires_grad_" else self._name == "unfreeze"
        if all(parameter.requires_grad == wanted for parameter in self._module.parameters()):
            return None
        return "parameters to train" if wanted else "frozen parameters"

    def remove(self) -> None:
        """Let the module have its method back, unless somebody has replaced it by now."""
        if vars(self._module).get(self._name) is self:
            if self._own is None:
                del vars(self._module)[self._name]
            else:
                vars(self._module)[self._name] = self._own

    def __reduce__(self) -> Any:
        return _itself, (self.__wrapped__,)


def _itself(method: Any) -> Any:
    return method


def _modules(model: nn.Module | None) -> list[nn.Module]:
    """All modules of a model but scripted ones, whose attributes are not Python's."""
    found = [] if model is None else list(model.modules())
    return [one for one in found if not isinstance(one, torch.jit.ScriptModule)]


def _changes_tensors(module: nn.Module, convert: Callable[[Any], Any]) -> bool:
    """Whether a function makes other tensors of those of a module."""
    with torch.no_grad():
        tensors = (*module.parameters(), *module.buffers())
        return any((made := convert(one)) is not one or made.dtype is not one.dtype for one in tensors)
