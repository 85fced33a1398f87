"""Two small, real learning tasks for the demo, the notebooks and the tests.

Both need no download: the digits come with scikit-learn, the English text with Python itself.
Every size is a parameter. Two peers that call a task with the same sizes get models that fit together,
whatever their Python version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hivenb.errors import MissingDependencyError, OptionsError

# The alphabet is fixed, not read off the text: the text differs between Python versions, and peers with
# alphabets of different sizes would have models of different shapes. Code 0 stands for any other character.
ALPHABET = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
VOCABULARY_SIZE = len(ALPHABET) + 1
_CODES = {character: code for code, character in enumerate(ALPHABET, start=1)}
_PLAIN = str.maketrans(
    {
        "\N{LEFT SINGLE QUOTATION MARK}": "'",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{LEFT DOUBLE QUOTATION MARK}": '"',
        "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
        "\N{EN DASH}": "-",
        "\N{EM DASH}": "-",
        "\N{HORIZONTAL ELLIPSIS}": "...",
    }
)


@dataclass(frozen=True)
class Task:
    """A model with its data, ready for a Trainer or a ``TrainingRun``.

    :param name: the key under which ``TASKS`` knows the task
    :param model: a LightningModule that logs ``loss`` in training and ``val_loss``, ``val_acc`` in validation
    :param train: shuffled batches; the loader's own generator decides the order
    :param validation: batches in a fixed order, or None
    :param metric: name of the logged metric that says best how good the model is, or None
    :param target_batch_size: samples per optimizer step, summed over all peers, with which the task trains well
    """

    name: str
    model: LightningModule
    train: DataLoader[Any]
    validation: DataLoader[Any] | None
    metric: str | None
    target_batch_size: int


class _Classifier(LightningModule):
    """What both models share: cross-entropy in nats, accuracy as a share, and AdamW."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate

    def predict_and_target(self, batch: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores, target = self.predict_and_target(batch)
        loss = F.cross_entropy(scores, target)
        self.log("loss", loss, prog_bar=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores, target = self.predict_and_target(batch)
        right = (scores.argmax(dim=1) == target).float().mean()
        size = len(batch[0])
        self.log("val_loss", F.cross_entropy(scores, target), prog_bar=True, batch_size=size)
        self.log("val_acc", right, prog_bar=True, batch_size=size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.01)


class _Residual(nn.Module):
    """Two convolutions with a shortcut around them.

    Group norm rather than batch norm: it has no running statistics, which peers would not share.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel_size=3, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel_size=3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.body(x)
        return result


class DigitsModel(_Classifier):
    """A small residual network for 8 x 8 images of handwritten digits.

    :param hidden: channels of the first half of the network, a multiple of 4; the second half has twice as many
    :param blocks: residual blocks in each half
    :param learning_rate: of AdamW, per swarm-wide step
    """

    def __init__(self, hidden: int = 32, blocks: int = 2, learning_rate: float = 1e-3) -> None:
        super().__init__(learning_rate)
        self.hidden = hidden
        self.blocks = blocks
        first = [nn.Conv2d(1, hidden, kernel_size=3, padding=1), *(_Residual(hidden) for _ in range(blocks))]
        wider = nn.Conv2d(hidden, 2 * hidden, kernel_size=3, padding=1)
        second = [wider, *(_Residual(2 * hidden) for _ in range(blocks)), nn.GroupNorm(4, 2 * hidden), nn.ReLU()]
        scores = nn.Linear(8 * hidden, 10)
        self.network = nn.Sequential(*first, nn.MaxPool2d(2), *second, nn.MaxPool2d(2), nn.Flatten(), scores)

    def forward(self, images: Tensor) -> Tensor:
        """Return one score per digit, shape (batch, 10), for images of shape (batch, 1, 8, 8) in 0..1."""
        scores: Tensor = self.network(images)
        return scores

    def predict_and_target(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return self(images), labels


class _Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with its norm in front and a shortcut around."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).flatten(-2))
        result: Tensor = x + self.feed_forward(x)
        return result


class TextModel(_Classifier):
    """A character-level transformer that predicts the next character; its losses are nats per character.

    :param context: characters that the model sees at most
    :param width: size of each position's vector; a multiple of ``heads``
    :param layers: number of transformer blocks
    :param heads: attention heads per block
    :param learning_rate: of AdamW, per swarm-wide step
    """

    def __init__(
        self, context: int = 64, width: int = 64, layers: int = 2, heads: int = 4, learning_rate: float = 5e-3
    ) -> None:
        super().__init__(learning_rate)
        self.context = context
        self.width = width
        self.layers = layers
        self.heads = heads
        self.characters = nn.Embedding(VOCABULARY_SIZE, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.scores = nn.Linear(width, VOCABULARY_SIZE)
        # The default scale of an embedding, 1, drowns what the blocks add in the first steps.
        nn.init.normal_(self.characters.weight, std=0.1)
        nn.init.normal_(self.positions.weight, std=0.1)

    def forward(self, codes: Tensor) -> Tensor:
        """Return scores of shape (batch, length, VOCABULARY_SIZE) for character codes (batch, length)."""
        places = torch.arange(codes.shape[1], device=codes.device)
        scores: Tensor = self.scores(self.blocks(self.characters(codes) + self.positions(places)))
        return scores

    def predict_and_target(self, batch: Any) -> tuple[Tensor, Tensor]:
        codes = batch[0].long()
        return self(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten()


def digits(
    batch_size: int = 32, hidden: int = 32, seed: int = 0, *, blocks: int = 2, learning_rate: float = 1e-3
) -> Task:
    """Recognize handwritten digits: 1,797 images of 8 x 8 pixels, a fifth of them for validation.

    :param batch_size: images per local batch
    :param hidden: channels of the network's first half; a multiple of 4
    :param seed: decides the split, the first weights and the order of the batches
    :param blocks: residual blocks in each half of the network
    :param learning_rate: of AdamW, per swarm-wide step
    :returns: the task, measured by ``val_acc``, the share of validation images that are recognized
    :raises OptionsError: if a size does not fit
    :raises MissingDependencyError: if scikit-learn is not installed
    """
    _check_sizes(batch_size=batch_size, hidden=hidden, blocks=blocks)
    _check_multiple("hidden", hidden, 4)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependencyError(
            'the digits come with scikit-learn, which is not installed: pip install "hivenb[demo]"'
        ) from error
    bunch = load_digits()
    images = torch.as_tensor(bunch.images, dtype=torch.float32).div(16).unsqueeze(1)
    labels = torch.as_tensor(bunch.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out = len(labels) // 5
    validation, train = order[:held_out], order[held_out:]
    return Task(
        name="digits",
        model=_seeded(lambda: DigitsModel(hidden, blocks, learning_rate), seed),
        train=_batches(TensorDataset(images[train], labels[train]), batch_size, shuffle_seed=seed),
        validation=_batches(TensorDataset(images[validation], labels[validation]), batch_size),
        metric="val_acc",
        target_batch_size=1024,
    )


def text(
    context: int = 64,
    width: int = 64,
    layers: int = 2,
    batch_size: int = 32,
    seed: int = 0,
    *,
    heads: int = 4,
    learning_rate: float = 5e-3,
) -> Task:
    """Predict the next character of English prose: the help topics in Python's standard library.

    The text has some 460,000 characters; its last tenth is for validation. The topics quote each other now
    and then, so the validation loss is a little lower than it would be on a book that nobody has read.

    :param context: characters per sample
    :param width: size of the model's vectors; a multiple of ``heads``
    :param layers: number of transformer blocks
    :param batch_size: samples per local batch
    :param seed: decides the first weights and the order of the batches
    :param heads: attention heads per block
    :param learning_rate: of AdamW, per swarm-wide step
    :returns: the task; ``loss`` and ``val_loss`` are in nats per character, ``val_acc`` is the share of characters
      that were guessed
    :raises OptionsError: if a size does not fit
    :raises MissingDependencyError: if this Python comes without its help topics
    """
    _check_sizes(context=context, width=width, layers=layers, batch_size=batch_size, heads=heads)
    _check_multiple("width", width, heads)
    codes = encode(_english())
    held_out = len(codes) // 10
    if context >= held_out:
        raise OptionsError(
            f"context must be below {held_out:,}, the characters of the validation text, not {context:,}"
        )
    train, validation = codes[:-held_out], codes[-held_out:]
    return Task(
        name="text",
        model=_seeded(lambda: TextModel(context, width, layers, heads, learning_rate), seed),
        train=_batches(_windows(train, context), batch_size, shuffle_seed=seed),
        validation=_batches(_windows(validation, context), batch_size),
        metric="val_acc",
        target_batch_size=512,
    )


def encode(characters: str) -> Tensor:
    """Return the codes of a text as a uint8 tensor; typographic signs become plain ones, others 0."""
    plain = characters.translate(_PLAIN)
    return torch.frombuffer(bytearray(_CODES.get(one, 0) for one in plain), dtype=torch.uint8)


def _english() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise MissingDependencyError(
            "the text is in Python's module pydoc_data, which this Python comes without; "
            "install the full standard library, or use the digits task"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def _windows(codes: Tensor, context: int) -> TensorDataset:
    # One character more than the context: the last one is only a target.
    return TensorDataset(codes.unfold(0, context + 1, context))


def _batches(dataset: TensorDataset, batch_size: int, shuffle_seed: int | None = None) -> DataLoader[Any]:
    if shuffle_seed is None:
        return DataLoader(dataset, batch_size=batch_size)
    generator = torch.Generator().manual_seed(shuffle_seed)
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True, generator=generator)


def _seeded(build: Callable[[], LightningModule], seed: int) -> LightningModule:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def _check_sizes(**sizes: int) -> None:
    wrong = [f"{name}={value!r}" for name, value in sizes.items() if not isinstance(value, int) or value < 1]
    if wrong:
        raise OptionsError(f"sizes of a task must be whole numbers of at least 1, not {', '.join(wrong)}")


def _check_multiple(name: str, value: int, of: int) -> None:
    if value % of:
        raise OptionsError(f"{name} must be a multiple of {of}, not {value}; {value + of - value % of} would do")


TASKS: dict[str, Callable[..., Task]] = {"digits": digits, "text": text}
