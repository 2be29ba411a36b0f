"""Whether a spec's groups leave a model's function as it is: permute them at random and compare outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from isthmus import ops
from isthmus.errors import InputError
from isthmus.flat import first_aliases
from isthmus.merging.sources import read_model

from .permutation import beside, identity_permutation
from .spec import PermutationSpec
from .trace import Outputs, arguments_of, as_evaluated, tensors_of

DRAWS = 2  # permutations that a spec must pass: units of one draw may happen to be dead behind a ReLU
SMALL = 0.1  # what gains, biases and branches that are zero at the start of training are drawn with


def changing_groups(
    spec: PermutationSpec, model: nn.Module, example_inputs: object, outputs: Outputs = None
) -> list[str]:
    r"""The groups that change a model's function when they are permuted.

    A copy of the model in float64 gets generic weights: those of the model with noise of half their own scale, since
    gains of one and biases of zero would hide errors; so do inputs that are all zero, if they are floating-point. All
    groups are permuted at random together; where outputs differ by more than rounding, one by one, and those that
    leave them as they are together once more.

    Outputs differ if their largest difference is more than the square root of the type's rounding, of their largest
    entry: 1.5e-8 in float64. A model that does not run in float64 is compared in its own type, so that a model in
    bfloat16 with operators that insist on it may differ by 0.09.

    Args:
        spec: the spec of the model.
        model: is run in evaluation mode; neither it nor the random states are changed.
        example_inputs: as for ``PermutationSpec.from_model``.
        outputs: likewise.

    Raises:
        InputError: the model does not have the tensors of the spec, cannot be copied, or has no finite outputs.
    """
    spec.check(read_model(model, "the model").tensors, name="the model")
    if not spec.groups:
        return []
    try:
        probe = _Probe(spec, model, example_inputs, outputs, doubled=True)
    except RuntimeError:  # the model or its device insists on another type
        probe = _Probe(spec, model, example_inputs, outputs, doubled=False)
    if not any(probe.changed_by(spec.groups) for _ in range(DRAWS)):
        return []
    changing = [name for name in spec.groups if any(probe.changed_by([name]) for _ in range(DRAWS))]
    others = spec.without(changing, "").groups
    return list(spec.groups) if any(probe.changed_by(others) for _ in range(DRAWS)) else changing


class _Probe:
    """A copy of a model with generic weights, whose outputs under permutations are compared with its own."""

    def __init__(
        self, spec: PermutationSpec, model: nn.Module, example_inputs: object, outputs: Outputs, *, doubled: bool
    ) -> None:
        self.spec = spec
        self.counted = outputs
        self.generator = torch.Generator().manual_seed(0)
        self.model = _copy(model)
        self.doubled = doubled
        arguments = arguments_of(example_inputs)
        if doubled:
            self.model._apply(_in_float64)
            arguments = pytree.tree_map(_in_float64, arguments)
        self.arguments = pytree.tree_map(self._varied, arguments)
        self.tensors = read_model(self.model, "the copy").tensors
        with torch.no_grad():
            self._randomise()
        self.own = {key: tensor.clone() for key, tensor in self.tensors.items()}
        # Rounding in float64 stays under 1e-11 in deep networks; a wrong group changes outputs by 1e-4 and more.
        types = {tensor.dtype for tensor in self.tensors.values() if tensor.is_floating_point() or tensor.is_complex()}
        self.tolerance = max((math.sqrt(torch.finfo(dtype).eps) for dtype in types), default=0.0)
        self.outputs = self._run()
        if not any(output.isfinite().any() for output in self.outputs):
            raise InputError("the model's outputs on example_inputs are not finite, so that no spec can be verified.")

    def _randomise(self) -> None:
        aliases = first_aliases(self.tensors)
        for key, tensor in self.tensors.items():
            if aliases[key] != key or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            known = tensor.nan_to_num(0.0, 0.0, 0.0)
            scale = float(known.norm()) / math.sqrt(max(tensor.numel(), 1))
            noise = torch.randn(tensor.shape, generator=self.generator).to(tensor.device, tensor.dtype)
            if key.rpartition(".")[2] == "running_var":
                tensor.copy_((known.abs() + SMALL) * (0.2 * noise).exp())
            else:  # what is infinite stays so
                tensor.add_(noise, alpha=0.5 * min(max(scale, SMALL), 1.0))

    def _varied(self, leaf: object) -> object:
        """An input; with noise if it is zero everywhere, as examples often are."""
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.count_nonzero():
            return leaf
        return torch.randn(leaf.shape, generator=self.generator, dtype=torch.float64).to(leaf)

    def _run(self) -> list[Tensor]:
        args, kwargs = copy.deepcopy(self.arguments)
        with as_evaluated(self.model), _Doubled() if self.doubled else torch.no_grad():
            torch.manual_seed(0)
            return [output.detach() for output in tensors_of(self.model(*args, **kwargs), self.counted)]

    def changed_by(self, names: Iterable[str]) -> bool:
        """Whether the outputs change when these groups are permuted at random."""
        identity = identity_permutation(self.spec)
        indices = self.spec.indices({name: self._cycle(identity[name]) for name in names})
        aliases = first_aliases(self.tensors)
        moved = [key for key in indices if aliases[key] == key and any(index is not None for index in indices[key])]
        with torch.no_grad():
            sources = [self.own[key] for key in moved]
            places = beside(sources, [indices[key] for key in moved])
            for here in ops.by_device(sources):
                ops.permute(
                    [sources[place] for place in here],
                    [places[place] for place in here],
                    out=[self.tensors[moved[place]] for place in here],
                )
            try:
                found = self._run()
            finally:
                for key in moved:
                    self.tensors[key].copy_(self.own[key])
        return not all(self._close(*pair) for pair in zip(self.outputs, found, strict=True))

    def _cycle(self, identity: Tensor) -> Tensor:
        """A random permutation in which every unit moves; drawn freely, two units would stay half the time."""
        order = torch.rand(identity.shape, generator=self.generator).argsort(-1)
        return torch.empty_like(identity).scatter_(-1, order, order.roll(1, -1))

    def _close(self, expected: Tensor, came: Tensor) -> bool:
        if not expected.is_floating_point() and not expected.is_complex():
            return torch.equal(expected, came)
        finite = expected.isfinite()
        if not torch.equal(finite, came.isfinite()):
            return False
        expected, came = expected[finite], came[finite]
        if expected.numel() == 0:
            return True
        return bool((expected - came).abs().max() <= self.tolerance * expected.abs().max().clamp(min=1e-30))


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:  # a tensor with a history, as torch.nn.utils.weight_norm leaves it
        raise InputError(
            f"{type(model).__name__} cannot be copied to verify its spec: {error} Where a module has computed weights, "
            "as after torch.nn.utils.weight_norm, use torch.nn.utils.parametrizations instead."
        ) from error


def _in_float64(leaf: object) -> object:
    if isinstance(leaf, Tensor) and leaf.is_complex():
        return leaf.to(torch.complex128)
    return leaf.to(torch.float64) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


class _Doubled(TorchFunctionMode):
    """Keep a model in float64 where its forward pass asks for another floating-point type by name."""

    narrow = frozenset({torch.float32, torch.float16, torch.bfloat16})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double
        args = tuple(self._wide(argument) for argument in args)
        return func(*args, **{name: self._wide(argument) for name, argument in (kwargs or {}).items()})

    def _wide(self, argument: object) -> object:
        return torch.float64 if isinstance(argument, torch.dtype) and argument in self.narrow else argument
