"""Traced atoms as a permutation spec: groups with names, axes as products of factors, reasons for what stays."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.flat import tied_keys
from isthmus.match.spec import STATISTICS, Factor, Group, PermutationSpec, Segment
from isthmus.match.spec import Axis as SpecAxis

from . import terms
from .graph import Traced
from .rules import Value
from .terms import Atom, Axis

LAST = frozenset({"weight", "bias", "in_proj_weight", "in_proj_bias"})  # parameters whose module names their units


def written(traced: Traced) -> PermutationSpec:
    """The spec that a trace amounts to."""
    for key, value in traced.state.items():
        if (value.key or key) not in traced.used:
            terms.freeze(value.axes, "the forward pass does not use it")
    _freeze_unread(traced)
    state = {value.key or key: value for key, value in traced.state.items()}
    _simplify(state)
    atoms = dict.fromkeys(atom for value in state.values() for atom in terms.leaves(value.axes))
    free = {atom: next(iter(atom.parents), None) for atom in atoms if atom.reason is None and atom.size > 1}
    names = _names(traced, free)
    groups = {}
    for atom, name in names.items():
        parent = free[atom]
        groups[name] = Group(name, atom.size, None if parent is None else names[parent])
    axes = {key: tuple(_axis(axis, names) for axis in value.axes) for key, value in traced.state.items()}
    frozen = {
        (key, dimension): _reason(value.axes[dimension], axis)
        for key, value in traced.state.items()
        for dimension, axis in enumerate(axes[key])
        if any(group is None and size > 1 for segment in axis for size, group in segment)
    }
    statistics = [key for key in axes if key.rpartition(".")[2] in STATISTICS]
    ties = tied_keys({key: value.key or key for key, value in traced.state.items()})
    return PermutationSpec(groups, axes, statistics=statistics, frozen=frozen, ties=ties)


def _freeze_unread(traced: Traced) -> None:
    """Freeze axes of which the forward pass reads a part: how long that is may depend on the size of the inputs."""
    for value in traced.state.values():
        for axis in value.axes:
            unread = [atom for atom in terms.leaves([axis]) if atom.reason is None and atom not in traced.read]
            if unread:
                terms.freeze([((atom,),) for atom in unread], "example_inputs do not reach it")
                terms.freeze([axis], "example_inputs reach only a part of it")


def _axis(axis: Axis, names: Mapping[Atom, str]) -> SpecAxis:
    """An axis as a spec has it; what stays is put together."""
    made: list[Segment] = []
    for digits in terms.segments(axis):
        factors: list[Factor] = []
        for atom in _factors(digits):
            size, name = (atom, None) if isinstance(atom, int) else (atom.size, names.get(atom))
            if name is None and factors and factors[-1].group is None:
                factors[-1] = Factor(factors[-1].size * size, None)
            elif size > 1:
                factors.append(Factor(size, name))
        segment = tuple(factors) or (Factor(1, None),)
        stays = all(factor.group is None for factor in segment)
        if stays and made and all(factor.group is None for factor in made[-1]):
            segment = (Factor(segment[0].size + made.pop()[0].size, None),)
        made.append(segment)
    return tuple(made)


def _reason(axis: Axis, made: SpecAxis) -> str:
    """Why an axis, or a part of it, stays."""
    reasons = dict.fromkeys(atom.reason for atom in terms.leaves([axis]) if atom.reason is not None)
    if not reasons and any(factor.group for segment in made for factor in segment):
        return "its parts are told apart"
    return "; ".join(reasons) or "its units are told apart one by one"


def _factors(digits: list[Atom]) -> list[Atom | int]:
    """The atoms of a product; a concatenation of one product with itself is a number of times that product."""
    found: list[Atom | int] = []
    for atom in digits:
        if atom.elementary:
            found.append(atom)
            continue
        assert atom.term is not None
        parts = terms.segments(atom.term)
        if all(part == parts[0] for part in parts) and any(leaf.reason is None for leaf in parts[0]):
            found += [len(parts), *_factors(parts[0])]
        else:
            found.append(atom.size)
    return found


def _simplify(state: dict[str, Value]) -> None:
    """Take away the freedom that axes of a spec cannot express, until there is none left."""
    changed = True
    while changed:
        simpler = [_simpler(value.axes) for value in state.values()]
        changed = any(simpler) or _nested(state)


def _simpler(axes: tuple[Axis, ...]) -> bool:
    """One pass over the axes of a tensor; whether anything changed."""
    before = _shape(axes)
    for axis in axes:
        for digits in terms.segments(axis):
            _concatenations(digits)
        for digits in terms.segments(axis):
            outer: list[Atom] = []
            for atom in (part for part in _factors(digits) if isinstance(part, Atom)):
                if atom.reason is None and atom in outer:
                    terms.freeze([((atom,),)], "it is twice in one product")
                for parent in list(atom.parents):
                    if parent not in outer:
                        atom.parents.discard(parent)  # on another axis, or inside: one order for all
                outer.append(atom)
            first = next((atom for atom in outer if atom.size > 1), None)
            for atom in outer:
                for parent in list(atom.parents):
                    if parent.reason is not None and parent is not first:
                        atom.parents.discard(parent)
    return before != _shape(axes)


def _concatenations(digits: list[Atom]) -> None:
    """Freeze concatenations behind another digit, but for those of one product with itself."""
    for atom in digits:
        if atom.cases is not None:
            terms.collapse(atom)
        elif atom.term is not None:
            parts = terms.segments(atom.term)
            if any(part != parts[0] for part in parts):
                terms.freeze([((atom,),)], "inside each unit of another group it is put together of several parts")
            else:
                _concatenations(parts[0])


def _nested(state: dict[str, Value]) -> bool:
    """Units that stay have units of their own order: write them out. Else leave each atom the outermost parent."""
    atoms = [atom for value in state.values() for atom in terms.leaves(value.axes)]
    changed = False
    for atom in dict.fromkeys(atoms):
        for parent in list(atom.parents):
            if parent.reason is not None and parent.elementary:
                terms.divide(parent, [1] * parent.size)
                changed = True
    if changed:
        return True
    for atom in dict.fromkeys(atoms):
        if len(atom.parents) > 1 or any(parent.parents for parent in atom.parents):
            kept = next((parent for parent in atoms if parent in atom.parents and not parent.parents), None)
            atom.parents.intersection_update({kept} if kept else ())
            changed = True
    return changed


def _shape(axes: tuple[Axis, ...]) -> list[object]:
    return [(id(atom), atom.elementary, atom.reason, frozenset(map(id, atom.parents))) for atom in terms.walk(axes)]


def _names(traced: Traced, free: dict[Atom, Atom | None]) -> dict[Atom, str]:
    """A name for each free atom: of the first operator's parameter whose units it is."""
    hints: dict[Atom, tuple[str, str]] = {}
    for atom, hint in traced.hints.items():
        for leaf in terms.leaves([((atom,),)]):
            hints.setdefault(leaf, hint)
    producers: dict[Atom, str] = {}
    for read, made in traced.products:
        for atom in terms.leaves(axis for value in made for axis in value.axes):
            if atom in free and atom not in producers:
                having = [value for value in read if atom in terms.leaves(value.axes)]
                having.sort(key=lambda value: -len(value.axes))
                if having and having[0].key is not None:
                    producers[atom] = having[0].key
    for value in traced.state.values():
        for atom in terms.leaves(value.axes):
            if atom in free and value.key is not None:
                producers.setdefault(atom, value.key)
    inner = set(free.values())
    names: dict[Atom, str] = {}
    taken: set[str] = set()
    for atom in sorted(free, key=list(producers).index):
        module, _, last = producers[atom].rpartition(".")
        parametrised = producers[atom].partition(".parametrizations.")
        if parametrised[1]:
            module, last = parametrised[0], parametrised[2].partition(".")[0]
        base = module if module and last in LAST else producers[atom]
        path, role = hints.get(atom, ("", ""))
        if role == "heads" and free[atom] is not None:
            role = "queries"
        if role:
            base = f"{path}.{role}" if path else role
        elif atom in inner:
            base = f"{base}.blocks"
        elif free[atom] is not None:
            base = f"{base}.units"
        name = next(n for n in (base, *(f"{base}.{i}" for i in range(2, 10**6))) if n not in taken)
        taken.add(name)
        names[atom] = name
    return names
