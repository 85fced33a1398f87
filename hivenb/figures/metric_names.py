"""What the name of a metric says: whether it is one of validation, a loss or a share, and which values are better."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum

#: How names of validation metrics begin.
_VALIDATION = re.compile(r"val(id|idation)?(?![a-z])", re.IGNORECASE)

#: The names of a validation loss. Lightning says which loader it is of, where there are several.
_VALIDATION_LOSS = re.compile(r"val(id|idation)?[^a-z0-9]*loss(/dataloader_idx_\d+)?", re.IGNORECASE)

_WORD = re.compile(r"[a-z]+\d*")

#: How words end that are a share of one, and others of which more, or less, is better.
_SHARES = ("acc", "accuracy", "precision", "recall", "f1", "auroc", "iou", "jaccard", "dice")
_HIGHER = ("bleu", "rouge", "score", "psnr", "ssim", "kappa")
_LOWER = ("loss", "error", "mse", "mape", "perplexity", "entropy")


class Better(Enum):
    """Which values of a metric are better."""

    HIGHER = "higher"
    LOWER = "lower"


#: Words that are short, and the ends of others.
_WHOLE_WORDS = {
    **dict.fromkeys(("auc", "r2", "map", "mrr", "ndcg"), Better.HIGHER),
    **dict.fromkeys(("err", "mae", "nll", "ppl", "wer", "cer", "fid", "kl"), Better.LOWER),
}


def is_of_validation(metric: str) -> bool:
    """Whether a metric is one of validation: ``val_loss``, ``val/acc``, ``validation_loss``."""
    return _VALIDATION.match(metric) is not None


def is_validation_loss(metric: str) -> bool:
    """Whether a metric is the loss of validation, or that of one of several validation loaders."""
    return _VALIDATION_LOSS.fullmatch(metric) is not None


def validation_loss_among(metrics: Iterable[str]) -> str | None:
    """The name of the loss of validation, of the first loader; ``None`` if there is none."""
    return min(filter(is_validation_loss, metrics), key=lambda name: (len(name), name), default=None)


def is_share(metric: str) -> bool:
    """Whether a metric is a share of one, better read as a percentage."""
    return _deciding_word(metric).endswith(_SHARES)


def better(metric: str) -> Better | None:
    """Which values of a metric are better; ``None`` if its name does not say it."""
    word = _deciding_word(metric)
    if word in _WHOLE_WORDS:
        return _WHOLE_WORDS[word]
    return Better.HIGHER if word.endswith((*_SHARES, *_HIGHER)) else Better.LOWER if word.endswith(_LOWER) else None


def _deciding_word(metric: str) -> str:
    """The last word that says something: ``acc`` of ``val_acc_top5``; empty if none does."""
    endings = (*_SHARES, *_HIGHER, *_LOWER)
    for word in reversed(_WORD.findall(metric.lower())):
        for one in (word, word.rstrip("0123456789")):
            if one in _WHOLE_WORDS or one.endswith(endings):
                return one
    return ""
