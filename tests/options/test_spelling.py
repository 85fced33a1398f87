from __future__ import annotations

import pytest

from hivenb.errors import OptionsError
from hivenb.options.options import Options, did_you_mean


def test_it_names_what_is_spelt_alike_and_nothing_else() -> None:
    assert did_you_mean(["target_batchsize"], ["target_batch_size", "run_id"]) == "Did you mean target_batch_size? "
    assert did_you_mean(["one", "runid"], ["target_batch_size", "run_id"]) == "Did you mean run_id? "
    assert did_you_mean(["something"], ["else"]) == ""


@pytest.mark.parametrize(
    "write",
    [
        lambda: Options(target_batchsize=5),  # type: ignore[call-arg]
        lambda: Options(target_batch_size=5, delay_grad_averageing=True),  # type: ignore[call-arg]
        lambda: Options(target_batch_size=5).replace(matchmakingtime=3.0),
    ],
)
def test_a_misspelt_option_is_guessed(write) -> None:
    with pytest.raises(OptionsError, match=r"Did you mean (target_batch_size|delay_grad_averaging|matchmaking_time)\?"):
        write()
