"""What people call their metrics, and what that says."""

from __future__ import annotations

import pytest

from hivenb.figures.metric_names import Better, better, is_of_validation, is_share, validation_loss_among


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("val_loss", Better.LOWER),
        ("val_acc", Better.HIGHER),
        ("val_acc_top5", Better.HIGHER),
        ("val_acc/dataloader_idx_0", Better.HIGHER),
        ("val/MulticlassAccuracy", Better.HIGHER),
        ("val_BinaryF1Score", Better.HIGHER),
        ("val_auroc", Better.HIGHER),
        ("val_auc", Better.HIGHER),
        ("val_iou", Better.HIGHER),
        ("val_bleu", Better.HIGHER),
        ("val_r2", Better.HIGHER),
        ("val_rmse", Better.LOWER),
        ("val_err", Better.LOWER),
        ("val_perplexity", Better.LOWER),
        ("accuracy_loss", Better.LOWER),
        ("val_temperature", None),
        ("val_power", None),
        ("val", None),
        ("", None),
    ],
)
def test_which_values_are_better(metric: str, expected: Better | None) -> None:
    assert better(metric) is expected


@pytest.mark.parametrize(("metric", "expected"), [("val_acc_top5", True), ("val_auroc", True), ("val_bleu", False)])
def test_what_is_a_share(metric: str, expected: bool) -> None:
    assert is_share(metric) is expected


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (["loss", "val_acc", "val_loss"], "val_loss"),
        (["val/loss"], "val/loss"),
        (["validation_loss", "valid_f1"], "validation_loss"),
        (["val_loss/dataloader_idx_1", "val_loss/dataloader_idx_0"], "val_loss/dataloader_idx_0"),
        (["val_loss_of_words", "value_loss", "loss"], None),
    ],
)
def test_which_one_is_the_loss_of_validation(metrics: list[str], expected: str | None) -> None:
    assert validation_loss_among(metrics) == expected
    assert expected is None or is_of_validation(expected)
