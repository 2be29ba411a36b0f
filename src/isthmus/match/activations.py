r"""Matching by activations: units that do the same on the same inputs.

Li, Yosinski, Clune, Lipson and Hopcroft, "Convergent learning: do different neural networks learn the same
representations?", ICLR 2016, arXiv 1511.07543 (correlations); Tatro et al., "Optimizing mode connectivity via neuron
alignment", NeurIPS 2020, arXiv 2009.02439; Ainsworth, Hayase and Srinivasa, arXiv 2209.04836, section 3.1 (inner
products).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle

from isthmus.batches import Inputs, run, split
from isthmus.errors import InputError
from isthmus.flat import FlatState, canonical_keys
from isthmus.merging.sources import Source, load_source
from isthmus.preserve import preserved_random_states

from .heads import best_orders, families, reached
from .inputs import chosen_groups, read_models
from .moments import CrossMoments
from .permutation import identity_permutation
from .report import Matching
from .similarity import Place, places
from .spec import PermutationSpec
from .weight_matching import Ascent

Method = Literal["correlation", "inner_product"]


def activation_matching(
    spec: PermutationSpec,
    model: nn.Module,
    a: Source,
    b: Source,
    data: Tensor | Iterable[object],
    *,
    method: Method = "correlation",
    only: str | Sequence[str] | None = None,
    batch_size: int = 256,
    seed: int = 0,
    backend: str = "auto",
) -> Matching:
    """The order of b's units in which they respond to inputs most as a's do.

    For every group the order is one assignment, on the correlations of units over all samples, or on their inner
    products. Each image and each place of a feature map, each token of a sequence, is a sample. A unit that does not
    vary, a dead one, correlates with nothing.

    Units are watched where layers read them: the inputs of linear layers and convolutions (one group of channels), so
    after the activation function and after residual sums. Where no layer reads a group (the query columns of attention,
    for instance), the outputs of layers that write it are watched, those of normalisation and embedding layers too. The
    similarities at several places are added. Groups at none of these are matched by weights afterwards, all others
    fixed; the report says which (``GroupReport.by``).

    Moments are float64 and updated batch by batch, without cancellation; the activations of one batch are held for both
    models. Models run in evaluation mode, on copies.

    Args:
        spec: which axes move together.
        model: a module of the architecture; it is not modified.
        a: the weights whose order stays: a module, a state dict, a ``FlatState`` or the path of a safetensors file.
        b: the weights whose units are to be permuted.
        data: inputs, on the device of the model: one tensor of shape (n, ...), or an iterable of batches (a
            ``DataLoader``), each a tensor, a mapping of arguments, or a sequence that begins with one of these.
        method: "correlation" or "inner_product".
        only: patterns (``fnmatch``) of the groups to match; others stay.
        batch_size: examples per batch where ``data`` is one tensor.
        seed: of the order in which groups are matched by weights.
        backend: as for ``isthmus.ops``.

    Returns:
        The permutation and its report, whose objective is that of ``weight_matching``, so that both compare.

    Raises:
        InputError: a model does not have the tensors of the spec or of the module, there is no data, activations or
            weights are NaN or infinite (the message names the layer or tensor), or an option is unknown.
    """
    began = time.perf_counter()
    if method not in ("correlation", "inner_product"):
        raise InputError(f'method is {method!r}, expected "correlation" or "inner_product".')
    free = chosen_groups(spec, only)
    models = read_models(spec, {"a": a, "b": b}, free, backend=backend)
    moments = _watch(model, (a, b), _sites(spec, model, free), split(data, batch_size))
    permutation, gaps = identity_permutation(spec), {}
    seen = frozenset(moments)  # of a group within another, its parent too: only with it units have an order
    seen |= {name for name in free if any(spec.groups[other].within == name for other in seen)}
    by = dict.fromkeys(seen, "activations")
    for family in families(spec, seen, at_once=True):
        similarities = {name: _similarity(moments.get(name, []), permutation[name], method) for name in family.members}
        (best,) = best_orders([family], similarities, permutation, backend=backend)
        permutation |= best.orders
        gaps[family.name] = best.bound - reached(family, similarities, permutation)
    unseen = free - seen
    if unseen:
        ascent = Ascent(spec, models.tensors, unseen, models.unit, backend=backend)
        found = ascent.run(permutation, torch.Generator().manual_seed(seed))
        permutation = found.permutation
        gaps = found.gaps | gaps
        by |= dict.fromkeys(unseen, "weights")
    objective = models.objective(permutation)
    report = models.report(
        f"activation matching ({method.replace('_', ' ')})",
        permutation,
        objective,
        sweeps=1,
        starts=[objective],
        gaps=gaps,
        by=by,
        began=began,
    )
    return Matching(permutation, report)


class Site(NamedTuple):
    """Where the units of a group are seen: an input or an output of a layer.

    Attributes:
        layer: the name of the module.
        outputs: whether its outputs are looked at, else its inputs.
        axis: the axis of the activations, from the end.
        place: how the units lie on it.
    """

    layer: str
    outputs: bool
    axis: int
    place: Place

    def samples(self, activations: Tensor) -> Tensor:
        """The activations as (samples, units)."""
        length = math.prod(factor.size for factor in self.place.segment)
        moved = activations.movedim(self.axis, -1).narrow(-1, self.place.start, length)
        split = moved.unflatten(-1, [factor.size for factor in self.place.segment])
        digits = [moved.dim() - 1 + digit for digit in self.place.units]
        count = math.prod(split.shape[digit] for digit in digits)
        samples: Tensor = split.movedim(digits, list(range(-len(digits), 0)))
        return samples.reshape(-1, count)


def _sites(spec: PermutationSpec, model: nn.Module, free: frozenset[str]) -> dict[str, tuple[list[Site], list[Site]]]:
    """Where the units of each free group are read, and where they are written."""
    keys = canonical_keys(model.state_dict(keep_vars=True))
    modules = dict(model.named_modules())
    read: dict[str, list[Site]] = {}
    written: dict[str, list[Site]] = {}
    for name, layer in modules.items():
        key = keys.get(f"{name}.weight" if name else "weight")
        if key not in spec.axes:
            continue
        for outputs, dimension, axis in _axes(layer):
            for group in spec.groups:
                for place in places(spec, group, [key]):
                    if place.dimension == dimension and not place.others(spec)[1] and not place.siblings(spec):
                        found = written if outputs else read
                        found.setdefault(group, []).append(Site(name, outputs, axis, place))
    return {name: (read.get(name, []), written.get(name, [])) for name in spec.groups if name in free}


def _axes(layer: nn.Module) -> list[tuple[bool, int, int]]:
    """For a kind of layer: whether outputs, which axis of its weight they are on, and on which axis of theirs."""
    if isinstance(layer, nn.Linear):
        return [(False, 1, -1), (True, 0, -1)]
    if type(layer).__name__ == "Conv1D":  # transformers' linear layer with a transposed weight
        return [(False, 0, -1), (True, 1, -1)]
    if isinstance(layer, _ConvNd):
        channels = -1 - len(layer.kernel_size)
        into, out = (0, 1) if isinstance(layer, _ConvTransposeNd) else (1, 0)
        if layer.groups == 1:
            return [(False, into, channels), (True, out, channels)]
        return [(True, out, channels)] if out == 0 else []
    if isinstance(layer, (_BatchNorm, _InstanceNorm, nn.GroupNorm)):
        return [(True, 0, 1)]
    if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) and len(layer.normalized_shape) == 1:
        return [(True, 0, -1)]
    return [(True, 1, -1)] if isinstance(layer, nn.Embedding) else []


class _Taken:
    """What hooks saw in one forward pass.

    Attributes:
        calls: (layer, outputs or inputs) -> the activations of each call.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[str, bool], list[Tensor]] = {}
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._hooks: dict[tuple[str, bool], RemovableHandle] = {}

    def clear(self) -> None:
        """Forget it, before the next pass."""
        self.calls.clear()
        self._copies.clear()

    def keep(self, where: tuple[str, bool], activations: object) -> None:
        """Keep a copy, as later layers may write in place; one for all that look at the same values."""
        if isinstance(activations, Tensor):
            what = (id(activations), 0 if activations.is_inference() else activations._version)
            if what not in self._copies:
                self._copies[what] = (activations, activations.clone())  # the original stays: its id is not used again
            self.calls.setdefault(where, []).append(self._copies[what][1])

    def hook(self, layer: nn.Module, name: str, outputs: bool) -> None:
        """Look at a layer's outputs or inputs from now on."""
        if outputs:
            handle = layer.register_forward_hook(lambda _, __, result: self.keep((name, True), result))
        else:
            handle = layer.register_forward_pre_hook(
                lambda _, inputs: self.keep((name, False), inputs[0] if inputs else None)
            )
        self._hooks[name, outputs] = handle

    def watch(self, layers: Set[tuple[str, bool]]) -> None:
        """Look at these alone from now on."""
        for where, handle in self._hooks.items():
            if where not in layers:
                handle.remove()


def _watch(
    model: nn.Module,
    sources: tuple[Source, Source],
    sites: Mapping[str, tuple[list[Site], list[Site]]],
    batches: Iterator[Inputs],
) -> dict[str, list[CrossMoments]]:
    """Run both models over all batches: the moments of each group at the sites that the first batch reaches."""
    layout = FlatState.from_module(model).layout
    layers = sorted({(site.layer, site.outputs) for both in sites.values() for one in both for site in one})
    twins, taken = [], []
    for source, name in zip(sources, "ab", strict=True):
        twin, seen = copy.deepcopy(model).eval(), _Taken()
        load_source(source, layout, name, next(twin.parameters()).device).bind(twin)
        for layer, outputs in layers:
            seen.hook(twin.get_submodule(layer), layer, outputs)
        twins.append(twin)
        taken.append(seen)
    moments: dict[str, dict[Site, CrossMoments]] = {}
    watched: dict[str, list[Site]] | None = None
    with torch.no_grad(), preserved_random_states():
        for inputs in batches:
            for twin, seen in zip(twins, taken, strict=True):
                seen.clear()
                run(twin, inputs)
            if watched is None:
                reached = {
                    name: [[site for site in one if (site.layer, site.outputs) in taken[0].calls] for one in both]
                    for name, both in sites.items()
                }
                watched = {name: read or written for name, (read, written) in reached.items() if read or written}
                for seen in taken:
                    seen.watch({(site.layer, site.outputs) for chosen in watched.values() for site in chosen})
            for group, chosen in watched.items():
                _update(moments.setdefault(group, {}), group, chosen, taken)
    if watched is None:
        raise InputError("data for activation matching holds no batch; pass inputs of the model.")
    return {group: list(found.values()) for group, found in moments.items()}


def _update(moments: dict[Site, CrossMoments], group: str, sites: Sequence[Site], taken: Sequence[_Taken]) -> None:
    """Add what a batch showed of a group; what several layers read at once counts once."""
    met = set()
    for site in sites:
        of_a, of_b = (seen.calls.get((site.layer, site.outputs), []) for seen in taken)
        for x, y in zip(of_a, of_b, strict=True):
            what = (id(x), site.axis, site.place.start, site.place.segment)
            if what in met:
                continue
            met.add(what)
            first, second = site.samples(x), site.samples(y)
            for name, samples in (("a", first), ("b", second)):
                if not bool(samples.isfinite().all()):
                    side = "outputs" if site.outputs else "inputs"
                    raise InputError(
                        f"the {side} of {site.layer!r} in {name} hold NaN or infinity, so that the units of {group!r} "
                        "have no similarity; look for such values in the data and the weights."
                    )
            if site not in moments:
                moments[site] = CrossMoments(first.shape[1], second.shape[1], device=first.device)
            moments[site].update(first, second)


def _similarity(moments: Sequence[CrossMoments], order: Tensor, method: Method) -> Tensor:
    """The sum over the sites, on the CPU; zero where there are none."""
    matrix = torch.zeros(order.numel(), order.numel(), dtype=torch.float64)
    for moment in moments:
        if method == "correlation":
            matrix += moment.correlation.cpu()
        else:
            first, second = moment.first, moment.second
            matrix += (first.count * (moment.covariance + torch.outer(first.mean, second.mean))).cpu()
    return matrix
