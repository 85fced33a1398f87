"""Each thing that the engine works around is still wrong in hivemind; where it no longer is, an override may go."""

from __future__ import annotations

import inspect
import multiprocessing as mp
import re
import threading
from collections.abc import Callable
from typing import Any

import hivemind
import pytest
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.matchmaking import Matchmaking, PotentialLeaders
from hivemind.averaging.partition import TensorPartContainer, TensorPartReducer
from hivemind.dht import DHTNode
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import CompositeValidator
from hivemind.optim import grad_averager, optimizer, progress_tracker, state_averager
from hivemind.p2p import P2P, ServicerBase
from tiny import TinyModel, samples

from hivenb.engine.network.dht import DHT


def source(function: Callable[..., Any]) -> str:
    """Without comments and docstrings, on one line."""
    text = re.sub(r'""".*?"""', "", inspect.getsource(function), flags=re.DOTALL)
    return " ".join(re.sub(r"#.*", "", text).split())


class TestProcesses:
    def test_the_averagers_start_method_is_the_default_one(self) -> None:
        assert issubclass(DecentralizedAverager, mp.Process), "ChildProcess._Popen may go, and one call in _after_fork"

    @pytest.mark.parametrize("run", [hivemind.DHT.run, DecentralizedAverager.run, DecentralizedAverager._run_internal])
    def test_nothing_ties_a_child_to_its_parent(self, run: Callable[..., Any]) -> None:
        assert not re.search(r"pidfd|prctl|PDEATHSIG|getppid|parent_process", source(run)), "settle_as_child may go"

    def test_the_daemon_is_in_the_callers_process_group(self) -> None:
        started = source(P2P.create)
        assert "create_subprocess_exec(" in started
        assert not re.search(r"start_new_session|setsid|preexec_fn|process_group", started), "TiedP2P may go"


class TestDht:
    def test_it_pauses_for_a_message_that_cannot_be_read_or_ends(self) -> None:
        run = source(hivemind.DHT.run)
        assert "await asyncio.sleep(self._node.protocol.wait_timeout)" in run, "DHT.run may be hivemind's again"
        assert "except (OSError, ConnectionError, RuntimeError)" in run, "DHT.run may be hivemind's again"

    def test_two_in_one_process_have_one_key(self) -> None:
        assert "RSAPrivateKey.process_wide()" in source(hivemind.dht.crypto.RSASignatureValidator.__init__), (
            "DHT.private_key may go"
        )


class TestAverager:
    def test_it_cannot_be_started_off_the_main_thread(self, dht: DHT, run_id: str) -> None:
        """And on it, the interrupt button is dead from then on."""
        raised: list[BaseException] = []

        def start() -> None:
            try:
                DecentralizedAverager([torch.zeros(1)], dht, prefix=run_id, start=True)
            except BaseException as e:
                raised.append(e)

        thread = threading.Thread(target=start)
        thread.start()
        thread.join(60)
        assert isinstance(raised[0], ValueError), "Averager.run_in_background may go"
        assert "signal only works in main thread" in str(raised[0])

    def test_the_name_of_a_subclass_is_a_part_of_the_names_of_its_rpcs(self) -> None:
        class Own(DecentralizedAverager):
            pass

        names = [kind._get_handle_name(None, "rpc_join_group") for kind in (DecentralizedAverager, Own)]
        assert names[0] != names[1], "Averager._get_handle_name may go"
        assert isinstance(inspect.getattr_static(ServicerBase, "_get_handle_name"), classmethod)

    def test_what_was_found_of_a_class_is_taken_for_that_of_its_subclasses(self, monkeypatch) -> None:
        monkeypatch.setattr(DecentralizedAverager, "_rpc_handlers", found := [])

        class Own(DecentralizedAverager):
            async def rpc_own(self, request: Any, context: Any) -> Any: ...

        Own._collect_rpc_handlers()
        assert Own._rpc_handlers is found, "Averager._collect_rpc_handlers may go"

    def test_the_size_of_a_group_is_looked_at_only_when_somebody_joins(self) -> None:
        users = [
            name
            for name, method in inspect.getmembers(Matchmaking, callable)
            if not name.startswith("__") and "target_group_size" in source(method)
        ]
        assert users == ["_check_reasons_to_reject", "rpc_join_group"], "EpochMatchmaking.expect may do less"

    def test_nobody_asks_for_the_epoch_of_who_joins_a_group(self) -> None:
        assert "gather" not in source(Matchmaking._check_reasons_to_reject), "EpochMatchmaking may do less"

    def test_two_that_ask_each_other_wait_for_each_other(self) -> None:
        assert source(Matchmaking.rpc_join_group).index("async with self.lock_request_join_group:") < source(
            Matchmaking.rpc_join_group
        ).index("_check_reasons_to_reject"), "EpochMatchmaking.rpc_join_group may go"

    def test_it_looks_for_peers_without_a_pause(self) -> None:
        assert "sleep" not in source(PotentialLeaders._update_queue_periodically), "PacedGroupKeyManager may go"

    def test_a_round_that_ends_opens_the_door_of_the_next_one(self) -> None:
        register = source(DecentralizedAverager._register_allreduce_group)
        assert register.endswith("self._pending_groups_registered.set()"), "Averager.rpc_aggregate_part may go"

    def test_a_sender_that_cannot_be_dialled_is_waited_for(self) -> None:
        communicate = source(AllReduceRunner._communicate_with_peer)
        assert "_ban_sender" not in communicate, "FaultTolerantRunner may go"

    def test_a_sender_that_leaves_takes_the_average_of_all_with_it(self) -> None:
        accumulate = source(TensorPartReducer.accumulate_part)
        assert accumulate.endswith("return await current_part_future"), "FaultTolerantReducer may go"

    def test_it_cuts_only_what_lies_in_memory_as_its_indices_say(self) -> None:
        with pytest.raises(RuntimeError, match="view"):
            TensorPartContainer([torch.zeros(3, 2, 4, 4).to(memory_format=torch.channels_last)], [1.0])

    def test_it_adds_up_in_single_precision(self) -> None:
        made = source(TensorPartReducer.reset_accumulators)
        assert "self.accumulator = torch.zeros(self.part_shapes[self.current_part_index])" in made, (
            "FaultTolerantReducer.reset_accumulators may go"
        )

    def test_a_client_waits_until_all_was_sent_even_to_the_dead(self) -> None:
        communicate = source(AllReduceRunner._communicate_with_peer)
        assert "await done_sending.wait()" in communicate, "aggregate_parts may do less"

    def test_a_stream_is_closed_by_who_answers(self) -> None:
        handle = source(P2P._add_protobuf_stream_handler)
        assert "with closing(writer): processing_task" in handle, "stream_ends.py may go"

    def test_shutting_down_takes_a_future_for_a_group(self) -> None:
        assert "group.finalize(cancel=True)" in source(DecentralizedAverager._shutdown), "_shutdown may do less"

    def test_a_failed_constructor_makes_a_noise(self) -> None:
        unfinished = DecentralizedAverager.__new__(DecentralizedAverager)
        unfinished._parent_pid = -1  # for its own __del__, at the end of this test
        del unfinished._parent_pid
        with pytest.raises(AttributeError):
            unfinished.__del__()
        unfinished._parent_pid = -1


class TestNode:
    def test_each_record_takes_a_search(self) -> None:
        assert "self.find_nearest_nodes(" in source(DHTNode.store_many), "Node.find_nearest_nodes may go"

    def test_storing_to_what_was_read_reads_it_again(self) -> None:
        update = source(DHTNode._update_cache_on_store)
        of_dictionary = update[update.index("elif is_dictionary and key_id in self.protocol.cache") :]
        assert "self._schedule_for_refresh(key_id, refresh_time=get_dht_time())" in of_dictionary, "Node.create may go"

    def test_reading_asks_as_many_as_a_bucket_holds(self) -> None:
        read = source(DHTNode.get_many_by_id)
        assert "beam_size if beam_size is not None else self.protocol.bucket_size" in read, "get_many_by_id may go"

    def test_records_are_checked_again_and_again(self) -> None:
        assert "cache" not in source(RSASignatureValidator.validate) + source(CompositeValidator.validate), (
            "CheckedOnce may go"
        )


class TestGradientAverager:
    def test_sums_are_set_to_zero_before_they_are_written(self) -> None:
        reset = source(grad_averager.GradientAverager.reset_accumulated_grads_)
        assert "grad_buf.zero_()" in reset, "GradientAverager.reset_accumulated_grads_ may go"

    def test_batches_count_alike_whatever_their_sizes(self) -> None:
        load = source(grad_averager.GradientAverager.load_accumulators_into_averager_)
        assert "1.0 / self.local_times_accumulated" in load, "GradientAverager may go"
        accumulate = source(grad_averager.GradientAverager.accumulate_grads_)
        assert "alpha = float(batch_size) / self._anchor_batch_size" in accumulate, "GradientAverager may go"

    def test_it_does_not_get_the_options_of_averagers(self) -> None:
        init = source(optimizer.Optimizer.__init__)
        made = init[init.index("self._make_gradient_averager(") :]
        assert "averager_opts" not in made[: made.index(")")], "Optimizer._make_gradient_averager may go"


class TestStateAverager:
    def test_initializing_an_optimizer_is_a_step(self) -> None:
        model = TinyModel()
        decaying = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        before = model.layer.weight.detach().clone()
        state_averager.initialize_optimizer_state_(decaying)
        assert not torch.equal(model.layer.weight, before), "initialize_optimizer_state may go"
        assert {float(state["step"]) for state in decaying.state.values()} == {1.0}

    def test_all_is_averaged_in_single_precision(self) -> None:
        made = source(state_averager.TrainingStateAverager._make_host_tensor)
        assert 'to(device="cpu", dtype=torch.float32, copy=True)' in made, "_make_host_tensor may go"

    def test_an_error_in_a_step_is_only_logged(self) -> None:
        handled = source(state_averager.TrainingStateAverager._do).rpartition("except Exception as e:")[2]
        assert "raise" not in handled.replace("raised exception", ""), "TrainingStateAverager._do and _note may go"
        # by these it hears of the error
        assert handled.index("finished_optimizer_step.set()") < handled.index("finished_averaging_round.set()")
        step = source(state_averager.TrainingStateAverager._do)
        assert step.index("self.optimizer.step()") < step.index("self._update_scheduler() self.finished_optimizer_step")


class TestTracker:
    def test_the_lock_is_held_over_a_read_of_the_dht(self) -> None:
        fetcher = source(progress_tracker.ProgressTracker._progress_fetcher)
        locked = fetcher[fetcher.index("enter_asynchronously(self.lock_global_progress)") :]
        assert "await _fetch_progress_unless_shutdown_triggered()" in locked, "_progress_fetcher may go"

    def test_a_report_cannot_be_withdrawn_nor_the_dht_be_closed_first(self) -> None:
        reporter = source(progress_tracker.ProgressTracker._progress_reporter)
        assert "value=local_progress.dict()" in reporter, "_progress_reporter may go"
        assert "except" not in reporter, "_progress_reporter may go"
        assert "except" not in source(progress_tracker.ProgressTracker.shutdown), "ProgressTracker.shutdown may go"

    def test_a_report_of_another_shape_ends_it(self) -> None:
        parse = source(progress_tracker.ProgressTracker._parse_swarm_progress_data)
        assert "parse_obj(peer_state.value) for peer_state in metadata.values()" in parse, "the filter may go"
        assert "self.local_progress.samples_accumulated" not in parse.split("valid_peer_entries", 1)[1], (
            "own samples are up to date: they need not be put in"
        )

    def test_a_failed_constructor_makes_a_noise(self) -> None:
        unfinished = progress_tracker.ProgressTracker.__new__(progress_tracker.ProgressTracker)
        with pytest.raises(AssertionError, match=r"__init__\(\) not called"):
            unfinished.__del__()
        threading.Thread.__init__(unfinished)  # for its own __del__, at the end of this test


class TestOptimizer:
    def test_client_mode_is_taken_the_wrong_way_round(self) -> None:
        assert "client_mode if client_mode is None else dht.client_mode" in source(optimizer.Optimizer.__init__), (
            "Optimizer.__init__ may pass client_mode on"
        )

    def test_the_next_chunk_has_to_come_within_the_matchmaking_time(self) -> None:
        assert "next_chunk_timeout if next_chunk_timeout is not None else matchmaking_time" in source(
            optimizer.Optimizer.__init__
        ), "NEXT_CHUNK_TIMEOUT may go"

    def test_the_state_is_asked_for_for_ever(self) -> None:
        assert "while True:" in source(optimizer.Optimizer.load_state_from_peers), "load_state_from_peers may go"

    def test_lightnings_tools_find_no_defaults(self) -> None:
        assert "self.defaults" not in inspect.getsource(optimizer.Optimizer), "Optimizer.defaults may go"

    def test_a_wrapper_that_inherits_from_it_ends_it(self) -> None:
        assert "self.shutdown()" in source(optimizer.Optimizer.__del__), "Optimizer.__del__ may go"

    def test_torch_cannot_load_its_state(self) -> None:
        assert 'state_dict["state"]["local_epoch"]' in source(optimizer.Optimizer.state_dict), "state_dict may go"
        model = TinyModel()
        adam = torch.optim.Adam(model.parameters())
        torch.nn.functional.mse_loss(model.layer(samples(4)[0]), samples(4)[1]).backward()
        adam.step()
        mixed = adam.state_dict()
        mixed["state"]["local_epoch"] = 3
        with pytest.raises(TypeError):
            sorted(mixed["state"])

    def test_a_failed_constructor_leaves_its_tracker_at_work(self) -> None:
        assert "except" not in source(optimizer.Optimizer.__init__), "Optimizer._abandon may go"
