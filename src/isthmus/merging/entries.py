"""Which entries of the models are merged, which are copied and from where, and whether they can be at all.

Everything is checked here, on keys, shapes, dtypes and the values of integer entries, before any arithmetic.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from isthmus import ops
from isthmus.errors import InputError
from isthmus.flat import first_aliases

from .sources import Model

Patterns = str | Sequence[str]

MERGED, EQUAL, COUNTED, SKIPPED, EMPTY = "merged", "equal in all", "of the first model", "skipped", "empty"


@dataclass(frozen=True, eq=False)
class Entries:
    """What a merge does with each entry.

    Attributes:
        first: key -> the first of the keys, in sorted order, that share its tensor; in the order of the lead.
        rules: first alias -> MERGED, EQUAL, COUNTED, SKIPPED or EMPTY, in sorted order.
        copied: first alias -> the tensor whose value the result takes, for what is not merged.
    """

    first: dict[str, str]
    rules: dict[str, str]
    copied: dict[str, Tensor]

    @property
    def merged(self) -> list[str]:
        """The keys that are merged, sorted: the order of the flat index."""
        return [key for key, rule in self.rules.items() if rule == MERGED]


def find_entries(
    models: Sequence[Model],
    base: Model | None,
    lead: Model,
    *,
    only: Patterns | None = None,
    skip: Patterns | None = None,
) -> Entries:
    """Sort out the entries of a merge.

    Args:
        models: the models.
        base: the base, if there is one.
        lead: whose keys, ties and skipped entries the result has: the base, the first model or the module written to.
        only: patterns of canonical keys; nothing else is merged.
        skip: patterns of canonical keys that are not merged, and may be missing, differ in shape, or be no tensors.

    Raises:
        InputError: a pattern matches nothing; or entries cannot be merged, with a list of all of them.
    """
    everyone = [lead, *(model for model in (base, *models) if model is not None and model is not lead)]
    known = {key for model in everyone for key in model.order}
    wanted, unwanted = _checked(only, "only", known), _checked(skip, "skip", known)
    chosen = {key for key in known if _is_chosen(key, wanted, unwanted)}
    aliases = first_aliases(lead.tensors)
    first = {key: aliases[key] for key in lead.tensors}
    problems = [
        f"{key!r} of {model.name} is a {type(value).__name__}, expected a tensor"
        for model in everyone
        for key, value in model.others.items()
        if key in chosen
    ]
    problems += _split_ties(first, chosen)
    for other in everyone[1:]:
        problems += _mismatches(lead, other, chosen, first)
    rules: dict[str, str] = {}
    copied: dict[str, Tensor] = {}
    for key in sorted(key for key, alias in first.items() if key == alias):
        tensor = lead.tensors[key]
        rules[key] = _rule(key, tensor, key in chosen)
        if rules[key] == COUNTED:
            copied[key] = models[0].tensors.get(key, tensor)
        elif rules[key] != MERGED:
            copied[key] = tensor
        if key in chosen and rules[key] == MERGED and tensor.dtype not in ops.DTYPES:
            problems.append(f"{key!r} of {lead.name} has dtype {tensor.dtype}, which cannot be merged")
    if not problems:
        problems = [problem for other in everyone[1:] for problem in _unequal(lead, other, rules)]
    if problems:
        raise InputError(
            f"the models cannot be merged: {'; '.join(problems)}. "
            "Make them agree, or leave entries out of the merge with skip= (a pattern of keys)."
        )
    return Entries(first, rules, copied)


def is_counter(key: str) -> bool:
    """Whether an entry is BatchNorm's count of batches: an integer that differs between models by right."""
    return key.rpartition(".")[2] == "num_batches_tracked"


def _rule(key: str, tensor: Tensor, chosen: bool) -> str:
    if not chosen:
        return SKIPPED
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return COUNTED if is_counter(key) else EQUAL
    return MERGED if tensor.numel() else EMPTY


def _checked(patterns: Patterns | None, name: str, keys: Iterable[str]) -> list[str] | None:
    """The patterns as a list; each matches at least one key."""
    if patterns is None:
        return None
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in listed:
        check_pattern(pattern, name, keys)
    return listed


def check_pattern(pattern: object, name: str, keys: Iterable[str], which: str = "of the models") -> None:
    """Raise an ``InputError`` for a pattern that matches no key: it is most likely a mistake in writing.

    Args:
        pattern: the pattern.
        name: of the argument, for error messages.
        keys: what it may match.
        which: of all keys these are, for error messages.
    """
    if not isinstance(pattern, str):
        raise InputError(f"{name} has the pattern {pattern!r}, a {type(pattern).__name__}, expected a string.")
    keys = list(keys)
    if not any(fnmatchcase(key, pattern) for key in keys):
        near = difflib.get_close_matches(pattern, keys, n=1, cutoff=0.3)
        hint = f" The nearest key is {near[0]!r}." if near else ""
        raise InputError(f"{name} has the pattern {pattern!r}, which matches no key {which}.{hint}")


def _is_chosen(key: str, only: list[str] | None, skip: list[str] | None) -> bool:
    wanted = only is None or any(fnmatchcase(key, pattern) for pattern in only)
    return wanted and not (skip is not None and any(fnmatchcase(key, pattern) for pattern in skip))


def _split_ties(first: dict[str, str], chosen: set[str]) -> list[str]:
    return [
        f"{alias!r} and {key!r} are one tied tensor, but only= and skip= choose one of them"
        for key, alias in first.items()
        if (key in chosen) != (alias in chosen)
    ]


def _mismatches(lead: Model, other: Model, chosen: set[str], first: dict[str, str]) -> list[str]:
    """How the entries of ``other`` differ from those of ``lead`` in keys, shapes, kinds of numbers and ties."""
    problems = [
        f"{other.name} lacks {key!r}, which {lead.name} has" for key in lead.tensors if _lacks(key, other, chosen)
    ]
    problems += [
        f"{other.name} has {key!r}, which {lead.name} lacks" for key in other.tensors if _lacks(key, lead, chosen)
    ]
    for key, mine in lead.tensors.items():
        theirs = other.tensors.get(key)
        if theirs is None or key not in chosen:
            continue
        if theirs.shape != mine.shape:
            problems.append(
                f"{key!r} has shape {tuple(theirs.shape)} in {other.name} and {tuple(mine.shape)} in {lead.name}"
            )
        elif _kind(theirs) != _kind(mine):
            problems.append(f"{key!r} is {theirs.dtype} in {other.name} and {mine.dtype} in {lead.name}")
        elif theirs.dtype not in ops.DTYPES and _kind(theirs) in ("real", "complex"):
            problems.append(f"{key!r} of {other.name} has dtype {theirs.dtype}, which cannot be merged")
        elif (alias := first[key]) != key and not _same(theirs, other.tensors.get(alias)):
            problems.append(
                f"{key!r} is tied to {alias!r} in {lead.name}, but {other.name} has different values for them"
            )
    return problems


def _lacks(key: str, model: Model, chosen: set[str]) -> bool:
    return key in chosen and key not in model.tensors and key not in model.others


def _unequal(lead: Model, other: Model, rules: dict[str, str]) -> list[str]:
    """The integer and boolean entries that should be equal and are not."""
    return [
        f"{key!r} is {lead.tensors[key].dtype} and differs between {lead.name} and {other.name}; integer and boolean "
        "entries are not averaged"
        for key, rule in rules.items()
        if rule == EQUAL and not torch.equal(lead.tensors[key], other.tensors[key].to(lead.tensors[key].device))
    ]


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    return "real" if tensor.is_floating_point() else str(tensor.dtype)


def _same(x: Tensor, y: Tensor | None) -> bool:
    """Whether two keys hold the same values; NaN is the same as NaN."""
    if y is None or x.shape != y.shape or x.dtype != y.dtype:
        return False
    same_memory = x.data_ptr() == y.data_ptr() and x.stride() == y.stride() and x.device == y.device
    return same_memory or bool(((x == y) | ((x != x) & (y != y))).all())
