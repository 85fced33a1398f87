"""Outcomes of several options side by side: a table, and their curves in one picture."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hivenb.run.comparison import Comparison, Outcome, run_each
from hivenb.view import theme, words
from hivenb.view.text import table

if TYPE_CHECKING:
    from hivenb.options.options import Options

_HEAD = ("options", "time/epoch", "stalled", "bytes/epoch", "memory", "final loss")
_WIDTH, _HEIGHT, _DPI = 9.0, 3.2, 110


class ShownComparison(Comparison):
    """A comparison that shows itself as the last line of a cell."""

    def __str__(self) -> str:
        return "\n".join(table(_HEAD, [_row(outcome) for outcome in self.outcomes], numbers_from=1))

    def png(self) -> bytes:
        """The loss of all, against time and against epochs of the swarm, as a PNG."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, name in zip(axes, ("seconds", "epochs of the swarm"), strict=True):
            axis.set_xlabel(name)
            axis.grid(color=theme.GREY, alpha=0.25, linewidth=0.5)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("loss")
        axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
        for number, outcome in enumerate(self.outcomes):
            loss = outcome.snapshot.series["loss"]
            color = _COLORS[number % len(_COLORS)]
            axes[0].plot(loss.times, loss.values, color=color, linewidth=1.5, label=outcome.name)
            axes[1].plot(loss.epochs, loss.values, color=color, linewidth=1.5)
        axes[0].legend(frameon=False)
        buffer = io.BytesIO()
        FigureCanvasAgg(figure).print_png(buffer)
        return buffer.getvalue()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        picture = base64.b64encode(self.png()).decode()
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in _HEAD)
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in _row(outcome))}</tr>"
            for outcome in self.outcomes
        )
        shown = f'<table><tr>{head}</tr>{rows}</table><img alt="loss of each" src="data:image/png;base64,{picture}">'
        return {"text/plain": str(self), "text/html": shown}


_COLORS = (theme.BLUE, theme.VERMILLION, theme.GREEN, theme.ORANGE, theme.PURPLE, theme.GREY)


def compare(
    options: Mapping[str, Options],
    model: Any,
    data: Any,
    *,
    epochs: int,
    local_peers: int = 2,
    seed: int = 0,
    **trainer_kwargs: Any,
) -> ShownComparison:
    """Train the same model with each of several options in turn, and put what came out side by side.

    Each training starts from the same parameters and random numbers, in a swarm of its own with as many peers. The
    outcome shows itself as the last line of a cell: time per epoch, share of it for which training stood still, bytes
    sent per epoch, memory, final loss, and the curves in one picture.

    :param options: by the name under which to compare them
    :param model: the LightningModule to begin with; it stays as it is
    :param data: a DataLoader, a LightningDataModule, or a pair of training and validation DataLoaders
    :param epochs: of the swarm, for each, after all peers have met; at least 2
    :param local_peers: further peers, as processes on this machine
    :param seed: of all random numbers
    :param trainer_kwargs: keyword arguments of ``lightning.Trainer``
    :returns: the outcomes, by name; ``to_dataframe()`` gives the figures
    :raises OptionsError: if there is nothing to compare
    :raises TrainingError: if a training ends before its epochs are over
    """
    done = run_each(options, model, data, epochs=epochs, local_peers=local_peers, seed=seed, **trainer_kwargs)
    return ShownComparison(done.outcomes)


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.name,
        f"{outcome.seconds_per_epoch:.2f} s",
        f"{outcome.stalled_share:.0%}",
        "not measured" if outcome.bytes_per_epoch is None else words.size(outcome.bytes_per_epoch),
        words.size(outcome.peak_memory),
        words.value(outcome.final_loss),
    )
