"""Greedy soups: average those models, best first, that do not make the average worse.

Wortsman et al., "Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing
inference time", ICML 2022, arXiv 2203.05482.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, overload

from torch import Tensor, nn

from isthmus.errors import EvaluationError, InputError
from isthmus.flat import FlatState
from isthmus.preserve import preserved_model, preserved_random_states

from .entries import find_entries
from .merge import merge, merge_into
from .sources import Source, read_model

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class SoupReport:
    """How a greedy soup came about.

    Attributes:
        scores: the score of each model by itself, in the order given.
        order: positions of the models in ``scores``, best first, of equals the first given first: the order of trial.
        trials: the score of the average tried with each model of ``order``; the first is the best model's own.
        kept: positions of the models that the soup is the average of, in the order of trial.
        maximize: whether a larger score is better.
    """

    scores: tuple[float, ...]
    order: tuple[int, ...]
    trials: tuple[float, ...]
    kept: tuple[int, ...]
    maximize: bool

    @property
    def score(self) -> float:
        """The score of the soup."""
        return self.trials[self.order.index(self.kept[-1])]


@overload
def greedy_soup(
    models: Iterable[Source],
    evaluate: Callable[[Any], float | Tensor],
    *,
    model: nn.Module | None = None,
    maximize: bool = True,
    return_report: Literal[False] = False,
) -> dict[str, Tensor]: ...
@overload
def greedy_soup(
    models: Iterable[Source],
    evaluate: Callable[[Any], float | Tensor],
    *,
    model: nn.Module | None = None,
    maximize: bool = True,
    return_report: Literal[True],
) -> tuple[dict[str, Tensor], SoupReport]: ...
def greedy_soup(
    models: Iterable[Source],
    evaluate: Callable[[Any], float | Tensor],
    *,
    model: nn.Module | None = None,
    maximize: bool = True,
    return_report: bool = False,
) -> dict[str, Tensor] | tuple[dict[str, Tensor], SoupReport]:
    """Average models greedily by a score on held-out data (recipe 1 of the paper).

    The models are sorted by their own score. Beginning with the best, each in turn is added to the average, and stays
    if the score of the average does not fall. Every average is the uniform one, ``merge(kept, method="linear")`` with
    the kept models in the order given, computed from the models themselves: nothing accumulates. There are as many
    evaluations as models to sort them, and one less to try them.

    The score chooses what is averaged, so it is no estimate of the soup's quality: report that on data that
    ``evaluate`` does not see.

    Args:
        models: modules, state dicts, flat states or paths of safetensors files, of one architecture. Integer entries,
            ties and prefixes are treated as by ``merge``. Files stay mapped, and take no memory of their own.
        evaluate: function of a state dict, or of ``model`` if that is given, that returns a number. The global random
            states are what they were before, afterwards.
        model: a module that has the weights of each average when ``evaluate`` is called with it. Its own weights,
            buffers, modes and gradients come back at the end, also after an error. What ``evaluate`` changes in it
            (BatchNorm statistics, for instance) does not enter the soup.
        maximize: whether a larger score is better; False for losses.
        return_report: whether to return the scores and choices too.

    Returns:
        The soup as a state dict of new tensors, and the report if asked for.

    Raises:
        InputError: there is no model, the models cannot be merged, or ``evaluate`` returns something else than a
            number.
        EvaluationError: a score is NaN; the message names the model.
    """
    sources = list(models)
    if not sources:
        raise InputError("greedy_soup got no models; give at least one.")
    read = [read_model(source, f"model {index}") for index, source in enumerate(sources, start=1)]
    lead = read[0] if model is None else read_model(model, f"the module {type(model).__name__}")
    find_entries(read, None, lead)  # who does not fit is found before the first evaluation
    tensors = [one.tensors for one in read]
    sign = 1 if maximize else -1
    with preserved_random_states(), _evaluator(evaluate, model) as score:
        scores = [score([state], f"model {index}") for index, state in enumerate(tensors, start=1)]
        order = sorted(range(len(scores)), key=lambda index: -sign * scores[index])
        trials, kept, best = [scores[order[0]]], [order[0]], scores[order[0]]
        for index in order[1:]:
            tried = sorted([*kept, index])
            name = f"the average of models {', '.join(str(i + 1) for i in tried)}"
            trials.append(score([tensors[i] for i in tried], name))
            if sign * trials[-1] >= sign * best:
                kept.append(index)
                best = trials[-1]
    soup = merge([tensors[index] for index in sorted(kept)], method="linear")
    report = SoupReport(tuple(scores), tuple(order), tuple(trials), tuple(kept), maximize)
    return (soup, report) if return_report else soup


@contextmanager
def _evaluator(
    evaluate: Callable[[Any], float | Tensor], model: nn.Module | None
) -> Iterator[Callable[[Sequence[Tensors], str], float]]:
    """The score of the average of some models, which error messages call by the name given."""
    if model is None:
        yield lambda tensors, name: _number(evaluate(merge(tensors, method="linear")), name)
        return
    with preserved_model(model), FlatState.from_module(model).bind(model):

        def score(tensors: Sequence[Tensors], name: str) -> float:
            merge_into(model, tensors, method="linear")
            return _number(evaluate(model), name)

        yield score


def _number(value: object, name: str) -> float:
    """What an evaluator returned, as a float that can be compared."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InputError(
            f"evaluate returned a {type(value).__name__} for {name}, expected a number. "
            'Choose one, as in lambda model: evaluator(model)["accuracy"].'
        ) from None
    if math.isnan(number):
        raise EvaluationError(f"evaluate returned NaN for {name}; leave the model out, or score it otherwise.")
    return number
