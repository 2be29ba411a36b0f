"""What evaluators measure, task by task: pure functions of the outputs and targets of one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from isthmus.errors import InputError

Loss = Callable[[Tensor, Tensor], Tensor]  # of outputs and targets: values per sample
Metric = Loss | Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # or values and their weights

IGNORED = -100  # the label of tokens that are not predicted, as PyTorch and Hugging Face have it

# A CPU takes the softmax of rows shorter than a vector register one element at a time, but that of columns many at
# once, which for 1024 rows of 10 classes needs a tenth of the time.
VECTOR = 16


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    r"""Negative log likelihood :math:`-\log \mathrm{softmax}(z)_y` of each sample, in nats.

    Args:
        outputs: logits, shape (n, classes) or (n, classes, ...).
        targets: class indices, shape (n,) or (n, ...); -100 gives loss 0.

    Returns:
        Losses of the shape of ``targets``.
    """
    few = outputs.dim() == 2 and outputs.shape[1] < VECTOR and outputs.device.type == "cpu"
    if few and not targets.is_floating_point():
        return functional.nll_loss(outputs.t().contiguous().log_softmax(0).t(), targets, reduction="none")
    return functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether the largest logit (of equal ones the first) is the target's; a sample with a NaN logit is wrong.

    Args:
        outputs: logits, shape (n, classes) or (n, classes, ...).
        targets: class indices, shape (n,) or (n, ...).

    Returns:
        Booleans of the shape of ``targets``.

    Raises:
        InputError: there is not one target per prediction; broadcasting would compare every sample with every other.
    """
    if outputs.dim() < 2 or targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        raise InputError(
            f"accuracy compares logits of shape {tuple(outputs.shape)} with targets of shape {tuple(targets.shape)}, "
            "expected (n, classes, ...) and class indices of shape (n, ...); where targets are probabilities of the "
            "classes, measure the loss alone (metrics=['loss']), or pass class indices (targets.argmax(1))."
        )
    largest, index = outputs.max(dim=1)
    return (index == targets) & ~largest.isnan()


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    r"""Squared errors :math:`(f(x) - y)^2`, one per component; evaluators average them per sample.

    Args:
        outputs: predictions, shape (n, ...).
        targets: what was to be predicted, of the same shape.

    Raises:
        InputError: the shapes differ; broadcasting (n, 1) against (n,) would compare every sample with every other.
    """
    if outputs.shape != targets.shape:
        raise InputError(
            f"regression compares outputs of shape {tuple(outputs.shape)} with targets of shape "
            f"{tuple(targets.shape)}, expected equal shapes; reshape the targets (targets[:, None], for example)."
        )
    return (outputs - targets).square()


def token_cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    r"""Negative log likelihood of each next token, :math:`-\log \mathrm{softmax}(z_t)_{y_{t+1}}`, in nats.

    The model returns logits :math:`z_t` for the token after position t; labels are not shifted, as in Hugging Face's
    causal language models. The mean is over tokens, so long sequences count more than short ones; its exponential is
    the perplexity.

    Args:
        outputs: logits, shape (n, length, vocabulary).
        targets: labels, mostly the input tokens themselves, shape (n, length); those of -100 are not counted.

    Returns:
        The loss of what each position predicts, shape (n, length), and whether it counts. The last position predicts
        nothing.
    """
    labels = _next_tokens(outputs, targets)
    losses = functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(labels.shape), labels != IGNORED


def token_accuracy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the largest logit is the next token's; arguments and shapes as for ``token_cross_entropy``."""
    labels = _next_tokens(outputs, targets)
    return accuracy(outputs.flatten(0, 1), labels.flatten()).view(labels.shape), labels != IGNORED


TASKS: Mapping[str, Mapping[str, Metric]] = {
    "classification": {"loss": cross_entropy, "accuracy": accuracy},
    "regression": {"loss": squared_error},
    "language_modelling": {"loss": token_cross_entropy, "accuracy": token_accuracy},
}


def _next_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    """The label that each position predicts."""
    if outputs.dim() != 3 or outputs.shape[:2] != targets.shape:
        raise InputError(
            f"language modelling compares logits of shape {tuple(outputs.shape)} with labels of shape "
            f"{tuple(targets.shape)}, expected (n, length, vocabulary) and (n, length)."
        )
    return torch.cat([targets[:, 1:], targets.new_full((len(targets), 1), IGNORED)], dim=1)
