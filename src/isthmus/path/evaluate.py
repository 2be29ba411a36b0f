"""Evaluate a model on resident data: losses and accuracies averaged over samples, one host read per evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from isthmus.errors import InputError
from isthmus.norms import preserved_modes
from isthmus.preserve import preserved_buffers

from . import calibrate
from .tasks import TASKS, Metric

Data = tuple[Tensor, Tensor] | Dataset[Any] | DataLoader[Any]

# Our own metrics score as many bytes of outputs together: their dozen small operations cost as much for 256 rows of 10
# logits as for 4096. Users' functions see each batch.
SCORED_BYTES = 2**20

SIZE = " size of outputs"  # no name that a user gives to a metric

Batches = Iterable[tuple[Tensor, Tensor]]


class Evaluator:
    r"""Metrics of a model on a fixed data set: :math:`\frac1n \sum_i m(f_\theta(x_i), y_i)`.

    The data is read once, when the evaluator is made, and stays on the device as one tensor of inputs and one of
    targets. Every evaluation sees the same examples in the same order. A ``DataLoader`` that shuffles or augments is
    drawn from once, so its order and augmentation are frozen.

    Sums are taken over samples (in language modelling over tokens), never over batches, in float64 on the device; the
    host waits once per evaluation. Models run in evaluation mode under ``torch.inference_mode`` and have their modes
    and buffers back afterwards, also if their forward pass changes them. Outputs in 16 bits are scored in float32.

    How the model is run is decided once, by a few timed passes of the first model; see ``calibrate``. It changes
    nothing but rounding. Give ``batch_size`` and ``memory_format`` for the same bits in every run.

    Attributes:
        inputs: the resident inputs, shape (n, ...).
        targets: the resident targets, shape (n, ...).
        metrics: name -> function of (outputs, targets) of one batch.
        batch_size: examples per forward pass; None until the first model has decided it, if it was not given.
        memory_format: of the inputs; None until the first model has decided it, if it was not given.
        dtype: the autocast dtype, or None.
        share_first_layer: whether scans may combine the first layer's outputs; see ``isthmus.path.shared``.
        graphs: whether scans may capture the model's passes in CUDA graphs; see ``isthmus.path.graphs``.
        alphas_at_once: how many models scans of a line may evaluate together; see ``isthmus.path.several``.
    """

    def __init__(
        self,
        data: Data,
        *,
        task: Literal["classification", "regression", "language_modelling"] = "classification",
        loss: Metric | None = None,
        metrics: Iterable[str] | Mapping[str, Metric] | None = None,
        unpack: Callable[[Any], Tensor] | None = None,
        batch_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        share_first_layer: bool | Literal["auto"] = "auto",
        graphs: bool = True,
        alphas_at_once: int | Literal["auto"] = "auto",
    ) -> None:
        """Materialise the data.

        Args:
            data: ``(inputs, targets)`` tensors, used without a copy where device and format fit; a map-style
                ``Dataset`` or a ``DataLoader`` whose items or batches are ``(input, target)``. In language modelling
                both are token indices of shape (n, length), targets not shifted, -100 where a token is not to be
                predicted (after the end of a sequence, for example); pass ``(tokens, tokens)`` if all are.
            task: what "loss" and "accuracy" mean: "classification" (``cross_entropy`` and ``accuracy``), "regression"
                (``squared_error``; no accuracy) or "language_modelling" (``token_cross_entropy``, ``token_accuracy``).
            loss: what "loss" means instead; not together with a mapping of ``metrics``, which can name it itself.
            metrics: names out of "loss" and "accuracy", by default all that the task has; or a mapping from any name
                to a function. A function takes the outputs and targets of a batch of k samples and returns values of
                shape (k, ...), of which those beyond the first axis are averaged per sample; or their mean over the
                batch as a 0-dim tensor; or values and weights of one shape, whose weighted mean over the data counts.
                A 0-dim value counts by the batch's samples, so unless it weighs them equally it depends on the batch
                size; where they have weights (the classes of ``torch.nn.CrossEntropyLoss(weight)``), return those.
            unpack: takes the tensor of outputs, shape (k, ...), out of what the model returns. By default that is the
                tensor itself, or the attribute ``logits`` of what Hugging Face models return.
            batch_size: examples per forward pass; by default decided by ``calibrate``.
            device: where the data lies and models are expected; by default where the inputs are.
            dtype: run models under autocast to this dtype (``torch.bfloat16``); by default in the model's own. Scans
                then report the difference that this makes at their ends.
            memory_format: of the inputs, ``torch.channels_last`` for example; by default decided by ``calibrate``.
            share_first_layer: whether scans may combine the first layer's outputs instead of computing them: "auto"
                where that is faster, True wherever it is possible, or False. Memory is limited either way.
            graphs: whether scans of a model on a CUDA device may capture its passes over the data in CUDA graphs, where
                the model allows. Give False for one whose forward pass does more than compute outputs, since replaying
                a graph runs no Python.
            alphas_at_once: how many models scans of a line may evaluate together where all parameters belong to linear
                layers: by default 16 on a CUDA device and 1, one after the other, elsewhere.

        Raises:
            InputError: the data is empty or cannot be understood, an option is unknown or out of range, or ``loss`` is
                given and nothing is measured by it.
        """
        inputs, targets = materialise(data)
        if memory_format is not None:
            inputs = calibrate.arranged(inputs, memory_format)
        device = inputs.device if device is None else torch.device(device)
        if batch_size is not None and not (isinstance(batch_size, int | np.integer) and batch_size >= 1):
            raise InputError(f"batch_size of an Evaluator must be an integer of at least 1, got {batch_size!r}.")
        if share_first_layer not in (True, False, "auto"):
            raise InputError(f"share_first_layer={share_first_layer!r} is unknown; it is 'auto', True or False.")
        if alphas_at_once != "auto" and not (isinstance(alphas_at_once, int) and alphas_at_once >= 1):
            raise InputError(f"alphas_at_once={alphas_at_once!r}, expected 'auto' or an integer of at least 1.")
        self.inputs = inputs.to(device)
        self.targets = targets.to(device)
        self.metrics = _metrics(task, metrics, loss)
        self.batch_size = None if batch_size is None else int(batch_size)
        self.memory_format = memory_format
        self.dtype = dtype
        self.share_first_layer = share_first_layer
        self.graphs = graphs
        self.alphas_at_once = alphas_at_once
        self._unpack = unpack
        ours = {metric for known in TASKS.values() for metric in known.values()}
        self._scored_bytes = SCORED_BYTES if ours.issuperset(self.metrics.values()) else 1

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def device(self) -> torch.device:
        """Where the data lies."""
        return self.inputs.device

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """The metrics of ``model``, by name; NaN where an output is.

        Raises:
            InputError: the model is on another device, writes into its input, or a metric returns a wrong shape.
        """
        return self.named(self.means(model).tolist())

    def means(self, model: nn.Module, *, size: bool = False) -> Tensor:
        """What a call returns, in the order of ``metrics``, as a float64 tensor on the device that nobody waited for.

        Args:
            model: what is evaluated.
            size: whether the mean norm of a sample's outputs comes last, which does not move in steps as scores do.

        Raises:
            InputError: as for a call.
        """
        return self._means(model, self.dtype, size=size)

    def named(self, means: Iterable[float]) -> dict[str, float]:
        """What a call returns, made of what ``means`` does."""
        return dict(zip(self.metrics, means, strict=True))

    def bare_means(self, model: Callable[[Tensor], Any], copies: int = 1) -> Tensor:
        """The forward passes and metrics of ``means`` alone, once the rest is decided.

        Their shape is (copies, metrics + 1), the sizes last.

        Args:
            model: what outputs come from; its mode and its buffers are not looked after.
            copies: how many models it stands for: it returns the outputs of all for a batch, one after the other.
        """
        with torch.inference_mode(), self._autocast(self.dtype):
            return self._mean(self._batches(self._outputs(model, copies), copies), copies, size=True).view(copies, -1)

    def outputs(self, model: nn.Module) -> Tensor:
        """The outputs of ``model`` for all inputs, in order, shape (n, ...), on the device.

        Raises:
            InputError: the model is on another device or writes into its input.
        """
        self.calibrate(model)
        with self._inference(model, self.dtype):
            return torch.cat(list(self._outputs(model)))

    def score(self, outputs: Tensor) -> dict[str, float]:
        """The metrics of outputs that are known, as ``outputs(model)`` returns them; in the batches of a call."""
        with torch.inference_mode():
            return self.named(self._mean(self._batches(torch.split(outputs, self.batch_size or len(self)))).tolist())

    def autocast_difference(self, model: nn.Module, values: Mapping[str, float]) -> dict[str, float]:
        """What autocast changed: ``values``, the metrics found under it, minus those in the model's own dtype."""
        exact = self.named(self._means(model, None).tolist())
        return {name: value - exact[name] for name, value in values.items()}

    def calibrate(self, model: nn.Module) -> None:
        """Decide now, for good, by this model, the batch size and memory format that were not given.

        A model with 2-d convolutions runs on inputs of both formats, and channels-last is taken if it is faster by at
        least 5 %. Then batch sizes are timed; see ``isthmus.path.calibrate``. All that costs about as much as one
        or two evaluations of the data.
        """
        if self.batch_size is not None and self.memory_format is not None:
            return
        with self._inference(model, self.dtype):
            size = self.batch_size or calibrate.starting_batch_size(model, self.inputs)
            memory_format = self.memory_format or calibrate.memory_format(model, self.inputs[:size])
        if self.memory_format is None and memory_format is not torch.contiguous_format:
            with torch.inference_mode(False):  # an inference tensor has no version counter to notice writes by
                self.inputs = calibrate.arranged(self.inputs, memory_format)
        self.memory_format = memory_format
        if self.batch_size is None:
            with self._inference(model, self.dtype):
                self.batch_size = calibrate.batch_size(model, self.inputs, size)

    def choices(self) -> dict[str, Any]:
        """How models are run, as results keep it."""
        return {
            "samples": len(self),
            "batch_size": self.batch_size,
            "memory_format": None if self.memory_format is None else _short(self.memory_format),
            "autocast": None if self.dtype is None else _short(self.dtype),
        }

    def _means(self, model: nn.Module, dtype: torch.dtype | None, *, size: bool = False) -> Tensor:
        self.calibrate(model)
        with self._inference(model, dtype):
            return self._mean(self._batches(self._outputs(model)), size=size)

    def _autocast(self, dtype: torch.dtype | None) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    @contextmanager
    def _inference(self, model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
        parameter = next(model.parameters(), None)
        if parameter is not None and parameter.device != self.device:
            raise InputError(
                f"the model is on {parameter.device} and the evaluator's data on {self.device}; "
                f"make it with Evaluator(..., device={str(parameter.device)!r})."
            )
        version = self.inputs._version
        with preserved_modes(model), torch.inference_mode(), self._autocast(dtype), preserved_buffers(model):
            model.eval()
            yield
        if self.inputs._version != version:
            raise InputError(
                "the model writes into its input, which is the evaluator's own data; "
                "make its first operation work out of place (inplace=False)."
            )

    def _outputs(self, model: Callable[[Tensor], Any], copies: int = 1) -> Iterator[Tensor]:
        """What the model returns, batch by batch."""
        batches = torch.split(self.inputs, self.batch_size or len(self))
        return (self._forward(model, inputs, copies) for inputs in batches)

    def _batches(self, batches: Iterable[Tensor], copies: int = 1) -> Batches:
        """Outputs and targets, batch by batch, or small ones of one model in several batches together."""
        pending: list[Tensor] = []
        samples = len(self)
        start = done = 0
        for batch in batches:
            pending.append(batch)
            done += batch.shape[0] // copies
            enough = copies > 1 or sum(outputs.nbytes for outputs in pending) >= self._scored_bytes
            if done == samples or enough:
                outputs = pending[0] if len(pending) == 1 else torch.cat(pending)
                yield outputs, self.targets[start:done]
                start = done
                pending.clear()

    def _forward(self, model: Callable[[Tensor], Any], inputs: Tensor, copies: int) -> Tensor:
        outputs = model(inputs)
        if self._unpack is not None:
            outputs = self._unpack(outputs)
        elif not isinstance(outputs, Tensor):
            outputs = getattr(outputs, "logits", outputs)
        if not isinstance(outputs, Tensor) or outputs.dim() == 0 or len(outputs) != copies * len(inputs):
            came = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
            raise InputError(
                f"the model returned {came} for {len(inputs)} inputs, expected one tensor of shape "
                f"({len(inputs)}, ...); pass unpack=, a function that takes it out of what the model returns."
            )
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs

    def _mean(self, batches: Batches, copies: int = 1, *, size: bool = False) -> Tensor:
        """The means over samples, copy by copy: those of all metrics, and with ``size`` that of the outputs."""
        metrics = [*self.metrics.items(), (SIZE, _norms)] if size else list(self.metrics.items())
        sums: dict[tuple[int, str], Tensor] = {}
        counts: dict[tuple[int, str], Tensor | int] = {}
        for together, targets in batches:
            for copy, outputs in enumerate([together] if copies == 1 else together.chunk(copies)):
                for name, metric in metrics:
                    total, count = _sum(metric(outputs, targets), len(targets), name)
                    place = copy, name
                    sums[place] = sums[place] + total if place in sums else total
                    counts[place] = counts.get(place, 0) + count
        return torch.stack([total / counts[place] for place, total in sums.items()])


def materialise(data: Data) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all examples as two tensors.

    Args:
        data: as for ``Evaluator``. A loader is read once, with whatever shuffling and augmentation it does.

    Raises:
        InputError: there are no examples, inputs and targets differ in number, or an item is not ``(input, target)``.
    """
    if isinstance(data, DataLoader):
        inputs, targets = _transpose(list(data), torch.cat)
    elif isinstance(data, Dataset):
        try:
            items = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
        except TypeError as error:
            raise InputError(
                "the data set has no length or no index; pass a map-style Dataset, a DataLoader or two tensors."
            ) from error
        inputs, targets = _transpose(items, default_collate)
    else:
        inputs, targets = _pair(data)
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        raise InputError(
            f"expected inputs and targets as tensors, got {type(inputs).__name__} and {type(targets).__name__}."
        )
    if inputs.shape[:1] != targets.shape[:1] or inputs.shape[:1].numel() == 0 or inputs.dim() == 0:
        raise InputError(
            "expected as many inputs as targets along the first axis, and at least one, "
            f"got inputs of shape {tuple(inputs.shape)} and targets of shape {tuple(targets.shape)}."
        )
    with torch.inference_mode(False):  # an inference tensor has no version counter to notice writes by
        return inputs.clone() if inputs.is_inference() else inputs, targets


def _transpose(items: list[object], join: Callable[[list[Any]], object]) -> tuple[object, object]:
    """Join the first and the second parts of (input, target) pairs."""
    if not items:
        raise InputError("the data holds no example; pass at least one.")
    pairs = [_pair(item) for item in items]
    return join([first for first, _ in pairs]), join([second for _, second in pairs])


def _pair(item: object) -> tuple[object, object]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        came = f"{len(item)} parts" if isinstance(item, (tuple, list)) else f"a {type(item).__name__}"
        raise InputError(f"expected data as (inputs, targets), got {came}; leave out what is neither.")
    return item[0], item[1]


def _metrics(task: str, metrics: Iterable[str] | Mapping[str, Metric] | None, loss: Metric | None) -> dict[str, Metric]:
    if task not in TASKS:
        raise InputError(f"task={task!r} is unknown; it is one of {', '.join(map(repr, TASKS))}.")
    known = {name: loss or metric if name == "loss" else metric for name, metric in TASKS[task].items()}
    if isinstance(metrics, Mapping):
        chosen = dict(metrics)
    else:
        names = known if metrics is None else [metrics] if isinstance(metrics, str) else list(metrics)
        if unknown := [name for name in names if name not in known]:
            raise InputError(
                f"unknown metric {unknown[0]!r}; known by name are {', '.join(known)}. "
                "Pass others as a mapping from name to function."
            )
        chosen = {name: known[name] for name in names}
    if not chosen:
        raise InputError("an Evaluator needs at least one metric, got none.")
    if loss is not None and (isinstance(metrics, Mapping) or "loss" not in chosen):
        raise InputError(
            f"loss= is given, and metrics= leaves it out, which measures {', '.join(chosen)}; leave out loss=, or have "
            'it measured: by its name, "loss", in a list, or as a function of the mapping.'
        )
    return chosen


def _norms(outputs: Tensor, _targets: Tensor) -> Tensor:
    """The norm of each sample's outputs."""
    numbers = outputs if outputs.is_floating_point() or outputs.is_complex() else outputs.double()
    norms: Tensor = torch.linalg.vector_norm(numbers.reshape(len(numbers), -1), dim=1)
    return norms


def _sum(values: Tensor | tuple[Tensor, Tensor], samples: int, name: str) -> tuple[Tensor, Tensor | int]:
    """The float64 sum of a batch's values and by how much it counts; per sample unless the metric gives weights."""
    if isinstance(values, tuple):
        values, weights = values
        if values.shape != weights.shape:
            raise InputError(
                f"metric {name!r} returned values of shape {tuple(values.shape)} with weights of shape "
                f"{tuple(weights.shape)}, expected equal shapes."
            )
        return (values * weights).sum(dtype=torch.float64), weights.sum(dtype=torch.float64)
    if values.dim() == 0:
        return values.to(torch.float64) * samples, samples
    if len(values) != samples:
        raise InputError(
            f"metric {name!r} returned shape {tuple(values.shape)} for {samples} samples, "
            f"expected ({samples}, ...) or ()."
        )
    return values.sum(dtype=torch.float64) / (values.numel() // samples), samples


def _short(name: torch.dtype | torch.memory_format) -> str:
    return str(name).removeprefix("torch.")
