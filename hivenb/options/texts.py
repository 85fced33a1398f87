"""What people should know about each option: in words, with unit, cost and gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class About:
    """What a person should know about one option.

    :param label: its name in words
    :param help: what it costs and gains, one sentence
    :param group: "overlap", "memory", "compression" or "rounds"
    :param unit: of a number: "samples", "seconds", "epochs" or "pieces"
    :param swarm_wide: whether all peers of a run must agree on it
    """

    label: str
    help: str
    group: str
    unit: str | None = None
    swarm_wide: bool = False


#: By the option's name in code, which is the same everywhere.
ABOUT: Mapping[str, About] = MappingProxyType(
    {
        "target_batch_size": About(
            "target batch size",
            "Samples that all peers gather before an update: more means less traffic, and fewer updates.",
            "rounds",
            unit="samples",
            swarm_wide=True,
        ),
        "run_id": About(
            "run name",
            "Peers with the same run name train together; anybody else in the swarm is left alone.",
            "rounds",
            swarm_wide=True,
        ),
        "batch_size": About(
            "batch size",
            "Samples in one batch of this peer; found in the data unless given.",
            "rounds",
            unit="samples",
        ),
        "delay_state_averaging": About(
            "state averaging in background",
            "Training goes on while parameters are averaged; the result is applied a little later.",
            "overlap",
        ),
        "delay_optimizer_step": About(
            "optimizer step in background",
            "Training goes on during the step and the averaging of parameters, with those of before the step.",
            "overlap",
        ),
        "delay_grad_averaging": About(
            "gradient averaging in background",
            "Training goes on while gradients are averaged, which then arrive up to one epoch late: no wait, but less "
            "is learned from as many samples (three peers on digits: accuracy 0.9 instead of 0.99).",
            "overlap",
        ),
        "offload_optimizer": About(
            "optimizer in main memory",
            "Keeps the optimizer's state off the GPU: saves its memory, and costs a copy each update.",
            "memory",
        ),
        "reuse_grad_buffers": About(
            "reuse gradient buffers",
            "Sums gradients where the model keeps them: saves memory, but rules out zero_grad.",
            "memory",
        ),
        "scheduler_fn": About(
            "learning rate schedule",
            "Makes the scheduler from the optimizer; it steps once per swarm epoch, alike on all peers.",
            "rounds",
        ),
        "matchmaking_time": About(
            "matchmaking time",
            "How long a round waits for peers: too short leaves some out, too long holds the others up.",
            "rounds",
            unit="seconds",
        ),
        "averaging_timeout": About(
            "averaging timeout",
            "A longer round is given up: too short loses slow peers, too long waits for lost ones.",
            "rounds",
            unit="seconds",
        ),
        "allreduce_timeout": About(
            "exchange timeout",
            "Limit for one exchange of data within a group; the averaging timeout unless given.",
            "rounds",
            unit="seconds",
        ),
        "next_chunk_timeout": About(
            "chunk timeout",
            "A peer silent for so long is left out of the round; the matchmaking time unless given.",
            "rounds",
            unit="seconds",
        ),
        "load_state_timeout": About(
            "state download timeout",
            "How long a peer that joins tries to download the others' state before it starts over.",
            "rounds",
            unit="seconds",
        ),
        "shutdown_timeout": About(
            "goodbye timeout", "How long a peer that leaves may take to say so.", "rounds", unit="seconds"
        ),
        "grad_compression": About(
            "gradients", "How gradients are sent: less traffic, for some precision.", "compression"
        ),
        "state_averaging_compression": About(
            "parameters",
            "How parameters are sent when they are averaged: less traffic, but peers agree less exactly.",
            "compression",
        ),
        "load_state_compression": About(
            "newcomers' state",
            "How the state is sent to peers that join: quicker to join, from a less exact start.",
            "compression",
        ),
        "grad_averager_factory": About(
            "gradient averager",
            "Replaces the way gradients are averaged, for example by PowerSGD, which sends far less.",
            "compression",
            swarm_wide=True,
        ),
        "average_state_every": About(
            "epochs between averagings",
            "How often parameters are averaged: more rarely saves traffic, and peers drift apart.",
            "rounds",
            unit="epochs",
            swarm_wide=True,
        ),
        "average_opt_statistics": About(
            "averaged optimizer statistics",
            "Averages these statistics of the optimizer too, such as exp_avg: closer peers, more traffic.",
            "rounds",
            swarm_wide=True,
        ),
        "average_buffers": About(
            "averaged buffers",
            "Averages BatchNorm's statistics and other buffers with the parameters; off, each peer has its own.",
            "rounds",
            swarm_wide=True,
        ),
        "frozen_parameters": About(
            "frozen layers",
            "Who joins compares what the optimizer was not given: up to 32 MB that differ, it downloads; more are an "
            "error, unless it is to download them, too, or to have its own.",
            "rounds",
        ),
        "keep_state_every": About(
            "epochs between kept states",
            "How often a good state is copied into main memory, to return to; none is kept without a number.",
            "memory",
            unit="epochs",
        ),
        "roll_back": About(
            "roll back by itself",
            "When the loss explodes, all peers return to their last good state: some epochs are lost, not the run.",
            "rounds",
            swarm_wide=True,
        ),
        "robust_aggregation": About(
            "robust averages",
            "Against members who send garbage: a bound on norms, or centered clipping, for some time and memory.",
            "rounds",
            swarm_wide=True,
        ),
        "use_local_updates": About(
            "local updates",
            "Each peer updates after every batch, and only parameters are averaged: no wait, less exact.",
            "overlap",
            swarm_wide=True,
        ),
        "outer_optimizer": About(
            "outer optimizer",
            "With local updates: peers send how far they have come, rarely, and step all together (DiLoCo).",
            "overlap",
            swarm_wide=True,
        ),
        "outer_fragments": About(
            "pieces sent in turn",
            "Each update of the outer optimizer sends one of so many pieces of the model: the line's peak falls.",
            "overlap",
            unit="pieces",
            swarm_wide=True,
        ),
        "client_mode": About(
            "client only",
            "Accepts no connections, for machines behind a firewall; others carry its share.",
            "rounds",
        ),
        "auxiliary": About("helper only", "Helps the others to average without training itself.", "rounds"),
        "averager_opts": About(
            "averager settings", "More settings for hivemind's averagers, by their names there.", "rounds"
        ),
        "tracker_opts": About(
            "progress settings",
            "More settings for hivemind's progress tracker, by their names there.",
            "rounds",
        ),
        "performance_ema_alpha": About(
            "speed smoothing",
            "Weight of the newest measurement in the estimate of speed: higher follows changes faster.",
            "rounds",
        ),
        "verbose": About("detailed log", "Logs every round, which helps to find out what holds peers up.", "rounds"),
    }
)
