"""A model's forward pass as a graph of ATen operators, and the axes of all its values."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from isthmus.errors import InputError
from isthmus.flat import canonical_keys, first_aliases
from isthmus.merging.sources import read_model
from isthmus.preserve import preserved_buffers, preserved_model, preserved_random_states

from . import elementwise, products, shapes, terms  # the rules register themselves
from .rules import CONSTANT, RULES, Call, Value, is_value, unlike

__all__ = ["Outputs", "Traced", "arguments_of", "elementwise", "products", "shapes", "tensors_of", "trace"]

VIEWS = frozenset(
    [
        "view",
        "reshape",
        "permute",
        "transpose",
        "t",
        "unsqueeze",
        "squeeze",
        "expand",
        "clone",
        "alias",
        "contiguous",
        "to",
        "_to_copy",
        "detach",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
    ]
)  # of a tensor of the state dict alone, they are still that tensor
PIECES = frozenset(
    ["select", "slice", "narrow", "slice_copy", "split", "split_with_sizes", "chunk", "unbind", "tensor_split"]
)  # they leave out what they do not take
FILLS = frozenset(
    ["full_like", "zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "zero"]
)  # they read no values
MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)

Outputs = Callable[[Any], object] | None


class Traced(NamedTuple):
    """What a trace found out.

    Attributes:
        state: canonical key -> the axes of each tensor of the state dict; tied keys share them.
        used: the keys that the forward pass reads.
        read: the elementary atoms that results depend on: they are summed over, told apart, or in an output. What is
            only sliced away is none of them.
        products: for each operator that reads tensors of the state dict, in order: these, and its results.
        hints: atoms that have a name by what is done with them.
    """

    state: dict[str, Value]
    used: frozenset[str]
    read: frozenset[terms.Atom]
    products: list[tuple[list[Value], list[Value]]]
    hints: dict[terms.Atom, tuple[str, str]]


def arguments_of(example_inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a forward pass: a tensor, a sequence, or a mapping of keywords.

    Raises:
        InputError: it is none of these.
    """
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise InputError(
        f"example_inputs is a {type(example_inputs).__name__}, expected a tensor, a tuple of positional arguments or "
        "a dict of keyword arguments of the model's forward pass."
    )


def tensors_of(returned: object, outputs: Outputs = None) -> list[Tensor]:
    """The tensors in whatever a forward pass returns; caches and other objects that torch does not look into are left.

    Args:
        returned: by the forward pass.
        outputs: takes out of it what counts; None takes all.

    Raises:
        InputError: there is none.
    """
    counted = returned if outputs is None else outputs(returned)
    found = [leaf for leaf in pytree.tree_leaves(counted) if isinstance(leaf, Tensor)]
    if not found:
        what = "the model returns" if outputs is None else "outputs= makes of what the model returns"
        raise InputError(
            f"{what} a {type(counted).__name__} without tensors; permutation specs need outputs that are "
            "tensors, or tuples, lists, dicts or Hugging Face outputs of them."
        )
    return found


class _Flat(nn.Module):
    """A model whose outputs are a flat tuple of tensors."""

    def __init__(self, model: nn.Module, outputs: Outputs) -> None:
        super().__init__()
        self.model = model
        self.outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(tensors_of(self.model(*args, **kwargs), self.outputs))


@contextmanager
def as_evaluated(model: nn.Module) -> Iterator[None]:
    """Run a model as it is evaluated, by operators that have rules; give it and the random states back afterwards."""
    fused = torch.backends.mha.get_fastpath_enabled()
    with preserved_random_states(), preserved_model(model), preserved_buffers(model), torch.no_grad():
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def _silent_log() -> Iterator[None]:
    """Keep torch from logging why an export fails; an error says so."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def exported(model: nn.Module, example_inputs: object, outputs: Outputs = None) -> torch.export.ExportedProgram:
    """The model's forward pass in evaluation mode as a graph of functional ATen operators.

    Raises:
        InputError: ``torch.export`` cannot trace it.
    """
    args, kwargs = arguments_of(example_inputs)
    stack: list[str] = []
    handles = []
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, _: object) -> None:
        stack.append(names[module])

    def leave(*_: object) -> None:
        stack.pop()

    for module in names:
        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        with as_evaluated(model), warnings.catch_warnings(), _silent_log():
            warnings.simplefilter("ignore")
            program = torch.export.export(_Flat(model, outputs), args, kwargs or None)
            decomposed: torch.export.ExportedProgram = program.run_decompositions({})
            return decomposed
    except InputError:
        raise
    except Exception as error:
        where = f"the module {stack[-1]!r}" if stack and stack[-1] else "its forward pass"
        reason = traceback.format_exception_only(error)[-1].strip().splitlines()[0].rstrip(".")
        raise InputError(
            f"torch.export cannot trace {type(model).__name__}: {where} failed with {reason}. Check that the model "
            "runs on example_inputs; forward passes that depend on values of tensors cannot be traced. A spec can be "
            "written by hand: PermutationSpec.from_dict."
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def trace(model: nn.Module, example_inputs: object, outputs: Outputs = None) -> Traced:
    """Follow every axis of a model's state through its forward pass.

    Raises:
        InputError: ``torch.export`` cannot trace the model.
    """
    tensors = read_model(model, "the model").tensors
    canonical = canonical_keys(model.state_dict(keep_vars=True))
    first = first_aliases(tensors)
    made: dict[str, Value] = {}
    state: dict[str, Value] = {}
    for key, tensor in tensors.items():
        alias = first[key]
        if alias not in made:
            made[alias] = Value(tuple(map(terms.fresh, tensor.shape)), key)
        state[key] = made[alias]
    return _Interpreter(state, canonical).run(exported(model, example_inputs, outputs))


class _Interpreter:
    """Runs an exported graph on values that are axes."""

    def __init__(self, state: dict[str, Value], canonical: Mapping[str, str]) -> None:
        self.state = state
        self.canonical = canonical
        self.used: set[str] = set()
        self.calls: list[tuple[list[Value], list[Value]]] = []  # what depends on values: arguments, and results
        self.pieces: list[tuple[terms.Axis, terms.Axis]] = []
        self.products: list[tuple[list[Value], list[Value]]] = []
        self.hints: dict[terms.Atom, tuple[str, str]] = {}

    def run(self, program: torch.export.ExportedProgram) -> Traced:
        signature = program.graph_signature
        sources = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        inputs: list[object] = []
        for node in program.graph.nodes:
            if node.op != "placeholder":
                continue
            example = node.meta.get("val")
            name = sources.get(node.name, "").removeprefix("model.")
            key = self.canonical.get(name)
            if key in self.state:
                if node.users:
                    self.used.add(self.state[key].key or key)
                inputs.append(self.state[key])
            elif isinstance(example, Tensor):
                lifted = node.name in signature.inputs_to_lifted_tensor_constants
                reason = CONSTANT if lifted else f"it meets the constant {name}" if name else "it meets an input"
                inputs.append(_fixed(example.shape, reason))
            else:
                inputs.append(example)
        returned = self._graph(program.graph_module, inputs)
        several = len(signature.user_outputs) > 1
        reason = "it is one of several outputs; outputs= says which count" if several else "it is an output"
        for spec, output in zip(signature.output_specs, returned, strict=True):
            if not is_value(output):
                continue
            key = self.canonical.get((spec.target or "").removeprefix("model."))
            if spec.kind in MUTATIONS and key in self.state:
                for pair in zip(self.state[key].axes, output.axes, strict=True):
                    terms.unify(*pair)
            else:
                terms.freeze(output.axes, reason)
                self.calls.append(([output], []))
        return Traced(self.state, frozenset(self.used), self._read(), self.products, self.hints)

    def _read(self) -> frozenset[terms.Atom]:
        """The atoms that results depend on: of what a call takes and does not pass on.

        Where a piece stays, as positions of a sequence do, what no piece takes may be in one on longer inputs.
        """
        found: set[terms.Atom] = set()
        for taken, made in self.calls:
            passed = terms.leaves(axis for value in made for axis in value.axes)
            found.update(atom for value in taken for atom in terms.leaves(value.axes) if atom not in passed)
        taken_up = terms.leaves(part for _, part in self.pieces)
        for axis, part in self.pieces:
            if any(atom.reason is not None for atom in terms.leaves([part])):
                found.difference_update(terms.leaves([axis]).keys() - taken_up.keys())
        return frozenset(found)

    def _graph(self, module: fx.GraphModule, inputs: list[object]) -> list[Any]:
        """The values that a graph returns."""
        known: dict[fx.Node, Any] = {}
        left = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(left)
            elif node.op == "get_attr":
                attribute = _attribute(module, str(node.target))
                constant = isinstance(attribute, Tensor)
                known[node] = _fixed(attribute.shape, CONSTANT) if constant else attribute
            elif node.op == "output":
                returned = fx.map_arg(node.args[0], lambda argument: known[argument])
                return list(returned) if isinstance(returned, (tuple, list)) else [returned]
            else:
                known[node] = self._call(node, known)
        return []

    def _call(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        args: Any = fx.map_arg(node.args, lambda argument: known[argument])
        kwargs: Any = fx.map_arg(node.kwargs, lambda argument: known[argument])
        target = node.target
        if getattr(target, "__name__", "") == "getitem":
            return args[0][args[1]]
        results = [result for result in pytree.tree_leaves(node.meta.get("val")) if isinstance(result, Tensor)]
        shapes = [tuple(result.shape) for result in results]
        name, arguments = _bound(target, args, kwargs)
        module = _module(node)
        call = Call(name, module, arguments, shapes, self.hints)
        values = call.values
        if not values and name not in RULES:
            outputs = [_fixed(shape, CONSTANT).axes for shape in shapes]
        elif name in RULES and not any(0 in shape for shape in shapes[:1]):
            outputs = RULES[name](call)
        else:
            outputs = unlike(values, shapes, f"no rule for {_spelled(target)}")
        view = name in VIEWS and len(values) == 1
        made = [Value(axes, values[0].key if view else None) for axes in outputs]
        if [value.shape for value in made] != shapes:
            reason = f"no rule for this use of {_spelled(target)}"
            made = [Value(axes) for axes in unlike(values, shapes, reason)]
        for value in made:
            terms.restrict(value.axes)
        if made and name not in FILLS:
            taken = [Value(tuple(call.read))] if name in PIECES else values
            self.calls.append((taken, made))
            self.pieces += call.pieces
        read = [value for value in values if value.key is not None]
        if read and not view:
            self.products.append((read, made))
        return made if isinstance(node.meta.get("val"), (tuple, list)) else (made[0] if made else None)


def _fixed(shape: tuple[int, ...], reason: str) -> Value:
    return Value(tuple(terms.fixed(size, reason) for size in shape))


def _attribute(module: nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _bound(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of an operator, and its arguments by name, defaults too."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return str(getattr(target, "__name__", target)), {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    names = [argument.name for argument in schema.arguments]
    bound = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    arguments = {name: named.get(name, bound.get(name)) for name in names}
    library, _, name = schema.name.partition("::")
    return (name if library == "aten" else f"{library}::{name}"), arguments


def _spelled(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return schema.name.replace("::", ".") if schema is not None else str(target)


def _module(node: fx.Node) -> str:
    """The path of the module whose forward makes a call."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return path.removeprefix("L['self'].").removeprefix("model").removeprefix(".")
