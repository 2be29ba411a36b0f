"""Evaluate a model on resident data: losses and accuracies averaged over samples, one host read per evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, default_collate

from isthmus.errors import InputError
from isthmus.norms import preserved_modes

Metric = Callable[[Tensor, Tensor], Tensor]
Data = tuple[Tensor, Tensor] | Dataset[Any] | DataLoader[Any]

# Unless a batch size is given, the largest output of a submodule stays within these bytes, by which a CPU keeps it in
# its cache and out of fresh memory pages. On 2 cores a small convolutional net is 3 times faster at 8 MiB (64 images)
# than at 32 MiB, and a 784-512-512-10 MLP slightly faster at 1024 samples than at 256. A GPU wants more per kernel.
CPU_ACTIVATION_BYTES = 2**23
GPU_ACTIVATION_BYTES = 2**26
MIN_BATCH_SIZE, MAX_BATCH_SIZE = 16, 1024


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    r"""Negative log likelihood :math:`-\log \mathrm{softmax}(z)_y` of each sample, in nats.

    Args:
        outputs: logits, shape (n, classes) or (n, classes, ...).
        targets: class indices, shape (n,) or (n, ...).

    Returns:
        Losses of the shape of ``targets``.
    """
    return functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether the largest logit (of equal ones the first) is the target's; a sample with a NaN logit is wrong.

    Args:
        outputs: logits, shape (n, classes) or (n, classes, ...).
        targets: class indices, shape (n,) or (n, ...).

    Returns:
        Booleans of the shape of ``targets``.
    """
    largest, index = outputs.max(dim=1)
    return (index == targets) & ~largest.isnan()


BUILT_IN: Mapping[str, Metric] = {"loss": cross_entropy, "accuracy": accuracy}


class Evaluator:
    r"""Metrics of a model on a fixed data set: :math:`\frac1n \sum_i m(f_\theta(x_i), y_i)`.

    The data is read once, when the evaluator is made, and stays on the device as one tensor of inputs and one of
    targets. Every evaluation sees the same examples in the same order. A ``DataLoader`` that shuffles or augments is
    drawn from once, so its order and augmentation are frozen.

    Sums are taken over samples, never over batches, in float64 on the device; the host waits once per evaluation.
    Models run in evaluation mode under ``torch.inference_mode`` and have their modes back afterwards. Outputs in 16
    bits are scored in float32.

    Attributes:
        inputs: the resident inputs, shape (n, ...).
        targets: the resident targets, shape (n, ...).
        metrics: name -> function of (outputs, targets) of one batch.
        batch_size: examples per forward pass; None until the first model has decided it, if it was not given.
        dtype: the autocast dtype, or None.
        share_first_layer: whether ``scan_line`` may skip the first layer between the ends; see ``isthmus.path.shared``.
    """

    def __init__(
        self,
        data: Data,
        *,
        loss: Metric = cross_entropy,
        metrics: Iterable[str] | Mapping[str, Metric] = ("loss", "accuracy"),
        batch_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        share_first_layer: bool = True,
    ) -> None:
        """Materialise the data.

        Args:
            data: ``(inputs, targets)`` tensors, used without a copy where device and format fit; a map-style
                ``Dataset`` or a ``DataLoader`` whose items or batches are ``(input, target)``.
            loss: what ``"loss"`` means, cross entropy unless given.
            metrics: names out of "loss" and "accuracy", or a mapping from any name to a function. A function takes the
                outputs and targets of a batch of k samples and returns values of shape (k, ...), of which those beyond
                the first axis are averaged per sample, or their mean over the batch as a 0-dim tensor.
            batch_size: examples per forward pass, which changes nothing but rounding; see ``fit_batch_size``.
            device: where the data lies and models are expected; by default where the inputs are.
            dtype: run models under autocast to this dtype (``torch.bfloat16``); by default in the model's own.
            memory_format: of the inputs, ``torch.channels_last`` for example.
            share_first_layer: whether ``scan_line`` may combine the first layer's outputs instead of recomputing them.

        Raises:
            InputError: the data is empty or cannot be understood, a metric is unknown, or ``batch_size`` is below 1.
        """
        inputs, targets = materialise(data)
        if memory_format is not None:
            inputs = inputs.contiguous(memory_format=memory_format)
        device = inputs.device if device is None else torch.device(device)
        if batch_size is not None and batch_size < 1:
            raise InputError(f"batch_size of an Evaluator must be at least 1, got {batch_size}.")
        self.inputs = inputs.to(device)
        self.targets = targets.to(device)
        self.metrics = _metrics(metrics, loss)
        self.batch_size = batch_size
        self.dtype = dtype
        self.share_first_layer = share_first_layer

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
        batch_size = self.fit_batch_size(model)
        with self._inference(model):
            batches = zip(torch.split(self.inputs, batch_size), torch.split(self.targets, batch_size), strict=True)
            return self._mean((self._forward(model, inputs), targets) for inputs, targets in batches)

    def outputs(self, model: nn.Module) -> Tensor:
        """The outputs of ``model`` for all inputs, in order, shape (n, ...), on the device.

        Raises:
            InputError: the model is on another device or writes into its input.
        """
        batch_size = self.fit_batch_size(model)
        with self._inference(model):
            return torch.cat([self._forward(model, inputs) for inputs in torch.split(self.inputs, batch_size)])

    def score(self, outputs: Tensor) -> dict[str, float]:
        """The metrics of outputs that are known already, as ``outputs(model)`` returns them."""
        with torch.inference_mode():
            return self._mean([(outputs, self.targets)])

    def fit_batch_size(self, model: nn.Module) -> int:
        """The batch size; if none was given, decide it now, for good, by this model.

        It is the power of two from 16 to 1024 with which no submodule returns more than 8 MiB, or 64 MiB on a GPU. That
        takes one forward pass of two samples.
        """
        if self.batch_size is None:
            budget = CPU_ACTIVATION_BYTES if self.device.type == "cpu" else GPU_ACTIVATION_BYTES
            with self._inference(model):
                fitting = max(1, int(budget / _activation_bytes(model, self.inputs[:2])))
            self.batch_size = min(MAX_BATCH_SIZE, max(MIN_BATCH_SIZE, 1 << fitting.bit_length() - 1))
        return self.batch_size

    @contextmanager
    def _inference(self, model: nn.Module) -> Iterator[None]:
        parameter = next(model.parameters(), None)
        if parameter is not None and parameter.device != self.device:
            raise InputError(
                f"the model is on {parameter.device} and the evaluator's data on {self.device}; "
                f"make it with Evaluator(..., device={str(parameter.device)!r})."
            )
        version = self.inputs._version
        autocast = torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)
        with preserved_modes(model), torch.inference_mode(), autocast:
            model.eval()
            yield
        if self.inputs._version != version:
            raise InputError(
                "the model writes into its input, which is the evaluator's own data; "
                "make its first operation work out of place (inplace=False)."
            )

    @staticmethod
    def _forward(model: nn.Module, inputs: Tensor) -> Tensor:
        outputs = model(inputs)
        if not isinstance(outputs, Tensor) or outputs.shape[:1] != inputs.shape[:1]:
            came = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
            raise InputError(
                f"the model returned {came} for {len(inputs)} inputs, expected one tensor of shape "
                f"({len(inputs)}, ...); wrap the model so that it returns its logits."
            )
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs

    def _mean(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        total = torch.zeros(len(self.metrics), dtype=torch.float64, device=self.device)
        for outputs, targets in batches:
            total += torch.stack([_sum(m(outputs, targets), len(targets), name) for name, m in self.metrics.items()])
        return dict(zip(self.metrics, (total / len(self)).tolist(), strict=True))


def is_compiled(model: nn.Module) -> bool:
    """Whether ``model`` or a part of it runs as compiled by ``torch.compile``, which hooks and patches would upset."""
    return any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in model.modules())


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


def _activation_bytes(model: nn.Module, inputs: Tensor) -> float:
    """Bytes per sample of the largest tensor among ``inputs`` and the outputs of the submodules."""
    largest = inputs.nbytes

    def hook(_module: nn.Module, _inputs: object, output: object) -> None:
        nonlocal largest
        if isinstance(output, Tensor):
            largest = max(largest, output.nbytes)

    handles = [] if is_compiled(model) else [module.register_forward_hook(hook) for module in model.modules()]
    try:
        model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return max(1, largest) / len(inputs)


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


def _metrics(metrics: Iterable[str] | Mapping[str, Metric], loss: Metric) -> dict[str, Metric]:
    if isinstance(metrics, Mapping):
        chosen = dict(metrics)
    else:
        names = [metrics] if isinstance(metrics, str) else list(metrics)
        if unknown := [name for name in names if name not in BUILT_IN]:
            raise InputError(
                f"unknown metric {unknown[0]!r}; known by name are {', '.join(BUILT_IN)}. "
                "Pass others as a mapping from name to function."
            )
        chosen = {name: loss if name == "loss" else BUILT_IN[name] for name in names}
    if not chosen:
        raise InputError("an Evaluator needs at least one metric, got none.")
    return chosen


def _sum(values: Tensor, samples: int, name: str) -> Tensor:
    """The float64 sum over ``samples`` samples of their values, or of their mean."""
    if values.dim() == 0:
        return values.to(torch.float64) * samples
    if len(values) != samples:
        raise InputError(
            f"metric {name!r} returned shape {tuple(values.shape)} for {samples} samples, "
            f"expected ({samples}, ...) or ()."
        )
    return values.sum(dtype=torch.float64) / (values.numel() // samples)
