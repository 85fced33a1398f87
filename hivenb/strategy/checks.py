"""What of a Trainer and its module does not go with the steps of a swarm, said before anything is started."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn, Protocol

import hivemind
import torch
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from hivenb._fresh_locks import free_in_children
from hivenb.engine.averaging.lazy_tensors import lazy_tensors, no_values
from hivenb.engine.network.access.tokens import InviteKey, Secret, as_secret
from hivenb.engine.network.addresses import PUBLIC, read_maddrs, with_ipv6
from hivenb.engine.network.dht import DHT, reachable_addresses
from hivenb.engine.optimizer.checkpoint import find_obstacle
from hivenb.engine.process.shared_memory import require_shared_memory
from hivenb.errors import OptionsError, SwarmError, TrainingError
from hivenb.options.options import DEFAULT_RUN_ID, FIELDS, Options, did_you_mean
from hivenb.swarm.invite import Invite, check_together, invite_from_environment, read_invite
from hivenb.system.environment import detect

#: Why a module that steps by hand is not trained so.
SUMS_BY_HAND = (
    "reuse_grad_buffers=True does not go with manual optimization: gradients are summed in the model, weighed by "
    "samples, and how many backward passes of yours make a step is not known. Leave out reuse_grad_buffers, or train "
    "with automatic optimization"
)

#: What to do where something is to be trained later.
LATER = (
    "Give the optimizer all that will be trained from the beginning, with requires_grad=True, and freeze what is to "
    "come later in on_train_start: what has no gradient stays as it is at all peers, until it is unfrozen at one of "
    "them. Or stop, unfreeze it, and start again, at all peers"
)


def check_trainer(trainer: Any, module: Any, optimizers: Sequence[Any], options: Options) -> None:
    """Refuse what cannot train with a swarm.

    :param optimizers: those that ``configure_optimizers`` returned
    :param options: with which it is to be trained
    :raises MisconfigurationException: with the reason, and what to do instead
    """
    if [type(one).__name__ for one in optimizers] == ["_MockOptimizer"]:  # which each of Lightning's packages has
        raise MisconfigurationException(
            f"{type(module).__name__}.configure_optimizers returned None, and without an optimizer the swarm has no "
            "step to make; return one"
        )
    if len(optimizers) != 1:
        raise MisconfigurationException(
            f"configure_optimizers gave {len(optimizers)} optimizers; HivemindStrategy supports one, with as many "
            "parameter groups as you like"
        )
    for callback in trainer.callbacks:
        _check_callback(callback)
    _check_values(module, optimizers[0])
    obstacle = find_obstacle(optimizers[0], module.modules(), bool(options.offload_optimizer))
    if obstacle is not None:
        raise MisconfigurationException(obstacle)
    if options.reuse_grad_buffers and not module.automatic_optimization:
        raise MisconfigurationException(SUMS_BY_HAND)
    if getattr(getattr(trainer, "_accelerator_connector", None), "_layer_sync", None) is not None:
        raise MisconfigurationException(
            "sync_batchnorm=True needs a process group, and peers of a swarm have none: they come and go, and each "
            "computes its batches by itself. Leave it out: the statistics that BatchNorm keeps are averaged with the "
            "parameters (average_buffers=True); for small batches a layer without statistics of the batch, such as "
            "GroupNorm, does as well"
        )


def _check_values(module: Any, optimizer: Any) -> None:
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    for name in lazy_tensors(module):
        if id(tensors[name]) in trained or not isinstance(tensors[name], torch.nn.Parameter):
            raise MisconfigurationException(no_values(module, name))


def _check_callback(callback: Any) -> None:
    kinds = {kind.__name__ for kind in type(callback).__mro__}  # each of Lightning's packages has its own of them
    if "BaseFinetuning" in kinds:
        raise MisconfigurationException(
            f"{type(callback).__name__} adds parameters to the optimizer while training, and what peers average is "
            f"laid down when it begins. {LATER}"
        )
    if "StochasticWeightAveraging" in kinds:
        raise MisconfigurationException(
            "StochasticWeightAveraging sets a learning rate of its own at a time of its own, which the swarm's step "
            "does not know of; use lightning.pytorch.callbacks.WeightAveraging, or a scheduler_fn and no weight "
            "averaging"
        )


def check_still_frozen(module: Any, unfrozen: Sequence[Any]) -> None:
    """Refuse to go on where parameters were unfrozen that peers do not average.

    :param module: that is trained
    :param unfrozen: those that were frozen when training began, and are not any more
    :raises MisconfigurationException: with the name of the first one, and what to do instead
    """
    if not unfrozen:
        return
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    raise MisconfigurationException(
        f"{names.get(id(unfrozen[0]), 'A parameter')} was frozen (requires_grad=False) when training began, and is not "
        f"any more; of such parameters there are {len(unfrozen)}. Peers average only what was to be trained from the "
        f"beginning. {LATER}"
    )


# -- further keywords ------------------------------------------------------------------------------------------------
#
# The strategy's keywords beyond its documented signature: whose they are, read off hivemind's own signatures.


#: What the strategy gives to hivemind's optimizer and to the DHT by itself.
_OPTIMIZERS_OWN = {"self", "dht", "optimizer", "params", "scheduler", "batch_size_per_step"}
_DHTS_OWN = {"self", "start", "p2p", "await_ready", "daemon", "record_validator", "host_maddrs", "args", "kwargs"}


@dataclass(frozen=True)
class SortedKeywords:
    """Keywords by who takes them: :class:`hivenb.Options`, ``hivemind.Optimizer`` alone, or the DHT."""

    options: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    dht: dict[str, Any] = field(default_factory=dict)


def sort_keywords(keywords: Mapping[str, Any]) -> SortedKeywords:
    """Sort keywords by who takes them.

    :param keywords: the ``**optimizer_kwargs`` of :class:`hivenb.HivemindStrategy`
    :raises OptionsError: if nobody knows one; the message lists those that somebody knows
    """
    result = SortedKeywords()
    homes = _homes()
    unknown = [name for name in keywords if name not in homes]
    if unknown:
        raise OptionsError(
            f"HivemindStrategy does not know {', '.join(map(repr, unknown))}. "
            f"{did_you_mean(unknown, [*homes, *FIELDS])}Beyond its documented parameters it takes "
            f"{', '.join(sorted(homes))}"
        )
    for name, value in keywords.items():
        getattr(result, homes[name])[name] = value
    return result


@cache
def _homes() -> dict[str, str]:
    dht = {
        name
        for function in (DHT.__init__, hivemind.DHT.__init__, DHTNode.create, P2P.create)
        for name in _names(function)
    }
    homes = dict.fromkeys(dht - _DHTS_OWN, "dht")
    homes |= dict.fromkeys(_names(hivemind.Optimizer.__init__) - _OPTIMIZERS_OWN, "optimizer")
    return homes | dict.fromkeys(FIELDS, "options")


def _names(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


# -- modules in training ---------------------------------------------------------------------------------------------
#
# Which modules are being trained at the moment, so that no two trainings share one.


class Holder(Protocol):
    """A strategy, as far as it matters here."""

    options: Options


_holders: weakref.WeakValueDictionary[int, Holder] = weakref.WeakValueDictionary()
_lock = threading.Lock()
free_in_children(_lock)


def hold(module: Any, strategy: Holder) -> None:
    """Let a strategy have a module for itself until :func:`let_go`. Again has no effect.

    :param module: the LightningModule, with which nothing has been done yet
    :param strategy: which lives for as long as it has the module
    :raises TrainingError: if another strategy has it; the module is as it was, and the other one trains on
    """
    with _lock:
        holder = _holders.setdefault(id(module), strategy)
    if holder is not strategy:
        raise TrainingError(
            f"this {type(module).__name__} is being trained already, by the run {holder.options.run_id!r}, and two "
            "trainings of one module would spoil each other: train a copy, copy.deepcopy(model), or stop that run first"
        )


def let_go(strategy: Holder) -> None:
    """Let others have the module that a strategy had."""
    with _lock:
        for key in [key for key, holder in _holders.items() if holder is strategy]:
            del _holders[key]


def run_that_trains(module: Any) -> str | None:
    """Name of the run that trains a module with :class:`hivenb.HivemindStrategy` in this process, if one does."""
    with _lock:
        holder = _holders.get(id(module))
    return None if holder is None else holder.options.run_id


# -- own dht ---------------------------------------------------------------------------------------------------------
#
# What the DHT that a strategy starts by itself is set to.


#: Where the strategy's own DHT listens when ``host_maddrs`` is not given, as documented for Lightning; with the same
#: for IPv6 where this machine has that.
DEFAULT_HOST_MADDRS = PUBLIC

#: Where the secret of a private swarm is looked for when none is given.
SECRET_VARIABLE = "HIVENB_SECRET"


def dht_settings(
    initial_peers: str | Iterable[str] | None,
    host_maddrs: list[str] | str | None,
    further: Mapping[str, Any],
    *,
    borrows: bool,
    client_mode: bool | None,
) -> dict[str, Any]:
    """Keyword arguments of the DHT.

    :param initial_peers: addresses of peers to join; by default those in the environment
    :param host_maddrs: where to listen
    :param further: other keyword arguments that were given for the DHT
    :param borrows: whether the strategy was given a DHT that runs, for which none of this can be set any more
    :param client_mode: whether nobody can connect to this peer; ``None`` to find out
    :raises MisconfigurationException: if an address cannot be read, or something was given for a DHT that runs
    """
    try:
        invite = _invite(initial_peers, borrows)
        secret = None if borrows else _credential(further.get("secret"), invite)
        listens_at = read_maddrs("host_maddrs", host_maddrs)
        further = dict(further)
        if announced := read_maddrs("announce_maddrs", further.get("announce_maddrs")):
            further["announce_maddrs"] = list(announced)
    except SwarmError as e:
        raise MisconfigurationException(str(e)) from e
    peers = invite.addresses
    own = sorted({"host_maddrs"} & {"host_maddrs" if host_maddrs else ""} | set(further))
    if borrows and (peers or own):
        raise MisconfigurationException(
            f"HivemindStrategy borrows a running DHT (dht=), so {', '.join(own or ['initial_peers'])} would have "
            "no effect; give it to that DHT when you start it, or leave out dht="
        )
    return {
        "initial_peers": list(peers) or None,
        "host_maddrs": list(listens_at or with_ipv6(DEFAULT_HOST_MADDRS)),
        "client_mode": client_mode,
        "is_walled": not detect().reachable,
        **further,
        "secret": secret,
    }


def invited_run(run_id: str, initial_peers: str | Iterable[str] | None, borrows: bool) -> str:
    """The name of the run that an invite has named, unless another one was given.

    :param run_id: that was given
    :param initial_peers: an invite, or addresses; by default those in the environment
    :param borrows: whether the strategy was given a DHT that runs
    :raises InviteError: if an invite or address cannot be read
    """
    return (_invite(initial_peers, borrows).run_id if run_id == DEFAULT_RUN_ID else None) or run_id


def how_to_join(dht: hivemind.DHT, secret: Secret | InviteKey | None) -> str:
    """What to tell those who are to join; nothing secret.

    :param dht: the strategy's own
    :param secret: which they need, or an invite's key, if there is one
    """
    addresses = ",".join(reachable_addresses(dht))
    if isinstance(secret, InviteKey):
        return f"Other machines can join this run with the same command and invite; this peer is at\n{addresses}"
    beside = "" if secret is None else f" and the same {SECRET_VARIABLE}"
    return f"Other machines can join this run with the same command{beside} and\nINITIAL_PEERS={addresses}"


def _invite(initial_peers: str | Iterable[str] | None, borrows: bool) -> Invite:
    given = read_invite(initial_peers)
    return given if given.addresses or borrows else invite_from_environment()


def _credential(given: Any, invite: Invite) -> Secret | InviteKey | None:
    secret = as_secret(given)
    check_together(secret, invite)
    if secret is None and invite.key is None and (value := os.environ.get(SECRET_VARIABLE, "").strip()):
        try:
            return Secret(value)
        except SwarmError as e:
            raise SwarmError(f"the environment variable {SECRET_VARIABLE}: {e}") from e
    return secret or invite.key


# -- shared memory ---------------------------------------------------------------------------------------------------
#
# How much memory a peer shares with the processes of its averagers, and whether there is so much.


#: Bytes in which the processes of a peer answer each other: 64 KiB for each, and as many again when those are used up.
ANSWERS = 8 * 2**16


def shared_bytes(optimizer: torch.optim.Optimizer, options: Options) -> int:
    """Bytes that the averagers of a model share with this process at least: a copy of all that is trained.

    :param optimizer: of the model's parameters
    :param options: of the training
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    one_copy = sum(parameter.numel() * max(4, parameter.element_size()) for parameter in trained)
    if options.use_local_updates:
        return one_copy if options.outer_optimizer is None else 3 * one_copy  # its parameters and its momentum
    return 2 * one_copy


def require_room_for(optimizer: torch.optim.Optimizer, options: Options) -> None:
    """Refuse a model for which there is too little shared memory, before its averagers crash.

    :raises PlatformError: with how much there is
    """
    require_shared_memory(shared_bytes(optimizer, options) + ANSWERS)


# -- trainer registry ------------------------------------------------------------------------------------------------
#
# Makes the strategy known to Lightning's Trainers: to both of its packages, and by its name.


#: Lightning comes as two packages with the same content, whose classes do not know each other.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

#: Samples in each global step with ``Trainer(strategy="hivemind")``, as in Lightning's documentation.
REGISTERED_TARGET_BATCH_SIZE = 8192

#: What LightningCLI makes of the class when nothing else is given for it: a name, in small letters.
_NAMES_OF_THE_CLASS = (
    "hivemindstrategy",
    "hivenb.hivemindstrategy",
    "hivenb.strategy.hivemindstrategy",
    "hivenb.strategy.strategy.hivemindstrategy",
)


def make_known(strategy: Any) -> None:
    """Let the Trainer of each of Lightning's packages that is imported by now take a strategy; again has no effect.

    :param strategy: a class with a ``strategy_name``; ``Trainer(strategy=strategy_name)`` makes one that is set to
      :data:`REGISTERED_TARGET_BATCH_SIZE`
    """
    for package in _PACKAGES:
        module: Any = sys.modules.get(f"{package}.strategies")
        if module is None:
            continue
        module.Strategy.register(strategy)
        registry = module.StrategyRegistry
        if strategy.strategy_name not in registry.available_strategies():
            for name in _NAMES_OF_THE_CLASS:
                registry.register(name, _say_what_is_missing, description="HivemindStrategy needs a target_batch_size")
            registry.register(
                strategy.strategy_name,
                strategy,
                description=f"Collaborative training with target_batch_size={REGISTERED_TARGET_BATCH_SIZE}",
                target_batch_size=REGISTERED_TARGET_BATCH_SIZE,
            )


def _say_what_is_missing() -> NoReturn:
    raise MisconfigurationException(
        "HivemindStrategy needs a target_batch_size: the samples that all peers gather together before each step. Give "
        "HivemindStrategy(target_batch_size=...), or on the command line also --trainer.strategy.target_batch_size=..."
    )
