"""A module's buffers in the rounds and downloads of an averager of the state, where all who take part have them.

They travel behind all that hivemind's averager sends, and each group decides by what its peers say of themselves: a
peer of plain hivemind neither misses them nor is it disturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.utils import get_logger

from hivenb.engine.averagers.module_buffers import ModuleBuffers
from hivenb.engine.rounds.averager import AveragerBase
from hivenb.engine.rounds.exact_tensors import ExactKey, SendsExactly
from hivenb.engine.rounds.gathered import is_marked

logger = get_logger(__name__)

#: What a peer says to its group before the fingerprint of its buffers, and in the metadata of a download.
_WORD = "module_buffers"


class _Outcome(IntEnum):
    """What a round has made of the buffers."""

    NONE_YET = 0
    AVERAGED = 1
    PLAIN = 2
    WITHOUT = 3
    OTHERS = 4


_WHY_NOT = {
    _Outcome.PLAIN: "a peer of plain hivemind takes part, which has none",
    _Outcome.WITHOUT: "a peer takes part whose model has none, or that has average_buffers=False",
    _Outcome.OTHERS: "a peer takes part whose model has buffers of other shapes",
}


class AveragesBuffers(DecentralizedAverager):
    """Mixin to put *before* hivemind's averager of the state.

    :param module_buffers: that peers average; ``None`` if there are none, or they are not to be averaged
    """

    def __init__(self, *args: Any, module_buffers: ModuleBuffers | None = None, **kwargs: Any):
        self.module_buffers = module_buffers
        self._downloaded_buffers: Sequence[torch.Tensor] | None = None
        self._said: set[str] = set()
        #: that the buffers were left out of a round or a download, and why, in words; ``None`` if they never were
        self.buffers_left_out: str | None = None
        # for both processes
        self._outcome = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._are_offered = torch.ones(1, dtype=torch.bool).share_memory_()
        super().__init__(*args, **kwargs)

    # -- in the process that trains -----------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if self.module_buffers is None:
            return super().step(*args, **kwargs)
        if kwargs.get("averaging_round"):
            # by now, since the module goes on with its own while they are averaged in the background
            super().step(wait_for_delayed_updates=True)
            self._apply_averaged_buffers()
            self._load_buffers(self.module_buffers)
        output = super().step(*args, **kwargs)
        self._apply_averaged_buffers()
        return output

    def _load_buffers(self, buffers: ModuleBuffers) -> None:
        if not buffers.are_as_described:
            self._are_offered.fill_(False)
            self._say("not averaged: the module has given one of them another shape")
        with self.get_tensors():
            buffers.load()

    def _apply_averaged_buffers(self) -> None:
        outcome = _Outcome(int(self._outcome))
        if self.module_buffers is None or outcome is _Outcome.NONE_YET:
            return
        self._outcome.zero_()
        if outcome is not _Outcome.AVERAGED:
            self._say(f"not averaged: {_WHY_NOT[outcome]}")
            return
        with self.get_tensors():
            mended = self.module_buffers.apply()
        if mended:
            logger.warning(f"Values that were not finite were replaced by the swarm's average in {', '.join(mended)}")

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self.buffers_left_out = what
            logger.warning(f"The buffers of the module, such as BatchNorm's statistics, are {what}")

    def get_current_state(self) -> tuple[Any, Any, Any]:
        metadata, tensors, infos = super().get_current_state()
        state = None if self.module_buffers is None else self.module_buffers.state()
        if self.module_buffers is None or state is None:
            return metadata, tensors, infos
        # behind all else, where hivemind's peers look for nothing
        metadata[_WORD] = [self.module_buffers.fingerprint, len(state)]
        return metadata, [*tensors, *state], [*infos, *(_info_of(one) for one in state)]

    def load_state_from_peers(self, *args: Any, **kwargs: Any) -> Any:
        self._downloaded_buffers = None
        output = super().load_state_from_peers(*args, **kwargs)
        self._take_over_download()
        return output

    def _take_over_download(self) -> None:
        downloaded, self._downloaded_buffers = self._downloaded_buffers, None
        if self.module_buffers is None or downloaded is None:
            return
        with self.get_tensors():
            fits = self.module_buffers.load_state(downloaded)
        if not fits:
            self._say("not downloaded: the state of the swarm has none that fit this module, which keeps its own")

    @property
    def state_compression(self) -> CompressionBase:
        """The codec of a download."""
        return self._state_compression

    @state_compression.setter
    def state_compression(self, codec: CompressionBase) -> None:
        self._state_compression = codec if self.module_buffers is None else SendsExactly(codec)

    # -- in the averager's own process --------------------------------------------------------------------------

    async def _step(self, *, step: StepControl, future_for_init: Any) -> None:
        if self.module_buffers is not None and bool(self._are_offered):
            record = [*self.serializer.loads(step.data_for_gather), [_WORD, self.module_buffers.fingerprint]]
            step._data_for_gather = self.serializer.dumps(record)
        await super()._step(step=step, future_for_init=future_for_init)

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any) -> Any:
        outcome = self._agree([self.serializer.loads(gathered) for gathered in group_info.gathered])
        if self.module_buffers is not None and outcome is _Outcome.AVERAGED:
            added = self.module_buffers.tensors
            infos = [_info_of(one, key) for one, key in zip(added, self.module_buffers.keys, strict=True)]
            kwargs["tensor_infos"] = (*kwargs["tensor_infos"], *infos)
            kwargs["compression"] = SendsExactly(kwargs["compression"])
            kwargs["added"] = added
        gathered = await super()._aggregate_with_group(group_info, min_vector_size, **kwargs)
        self._outcome.fill_(outcome)
        return gathered

    async def _run_allreduce_inplace_(
        self,
        tensors: Sequence[torch.Tensor],
        group_info: GroupInfo,
        *args: Any,
        added: Sequence[torch.Tensor] = (),
        **kwargs: Any,
    ) -> None:
        await super()._run_allreduce_inplace_((*tensors, *added), group_info, *args, **kwargs)

    def _agree(self, records: Sequence[list[Any]]) -> _Outcome:
        """Whether a group averages buffers; all its peers have the same records, and come to the same answer."""
        if self.module_buffers is None:
            return _Outcome.NONE_YET
        if not all(map(is_marked, records)):
            return _Outcome.PLAIN
        said = [next((one[1] for one in record if _is_word(one)), None) for record in records]
        if None in said:
            return _Outcome.WITHOUT
        return _Outcome.AVERAGED if all(one == said[0] for one in said) else _Outcome.OTHERS


class DownloadsBuffers(AveragerBase):
    """Base to put *behind* hivemind's averager of the state: it is shown a download without the buffers."""

    local_epoch: int
    module_buffers: ModuleBuffers | None
    _downloaded_buffers: Sequence[torch.Tensor] | None

    def load_state_from_peers(self, *args: Any, **kwargs: Any) -> Any:
        loaded = super().load_state_from_peers(*args, **kwargs)
        if loaded is None:
            return None
        metadata, tensors = loaded
        fingerprint, count = sent_buffers(metadata)
        kept = max(0, len(tensors) - count)
        epoch = metadata.get("epoch") if isinstance(metadata, dict) else None
        if isinstance(epoch, int) and epoch >= self.local_epoch:  # else hivemind refuses the state
            fits = self.module_buffers is not None and fingerprint == self.module_buffers.fingerprint
            self._downloaded_buffers = tensors[kept:] if fits else ()
        return metadata, tensors[:kept]


def sent_buffers(metadata: Any) -> tuple[str | None, int]:
    """Fingerprint and number of the buffers in a download; anybody may send anything."""
    word = metadata.get(_WORD) if isinstance(metadata, dict) else None
    if isinstance(word, (list, tuple)) and len(word) == 2 and isinstance(word[1], int) and word[1] >= 0:
        return str(word[0]), word[1]
    return None, 0


def _is_word(one: Any) -> bool:
    return isinstance(one, (list, tuple)) and len(one) == 2 and one[0] == _WORD


def _info_of(tensor: torch.Tensor, key: ExactKey | None = None) -> CompressionInfo:
    return CompressionInfo.from_tensor(tensor, key=key or ExactKey())
