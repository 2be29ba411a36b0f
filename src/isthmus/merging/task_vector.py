"""Task vectors: what training added to a base, to be scaled, added, negated and applied."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus import ops
from isthmus.errors import InputError

from .entries import find_entries
from .sources import Model, Source, read_model

_serials = itertools.count()  # tell one task vector from another, also after it is gone


class _Difference(NamedTuple):
    """A model minus its base, or a task vector given as such (without a base); tensors are held, not copied."""

    base: Model | None
    model: Model


class _Term(NamedTuple):
    coefficient: float
    difference: _Difference


class TaskVector:
    """The task vector τ = θ − θ₀ of a model, and linear combinations Σ cᵢ τᵢ of such.

    ``TaskVector(base, a) * 0.4 + TaskVector(base, b)`` computes nothing: it remembers the models, by reference, and
    their coefficients in float64. The arithmetic is that of the coefficients: τ − τ is exactly zero and (τ + τ) / 2
    exactly τ. Tensors are computed when they are asked for, as the left fold of cᵢ · (θᵢ − θ₀) in the order in which
    the task vectors first came, each operation rounded once in the type to which the dtypes promote, at least float32.
    ``apply_to`` adds the base, and rounds once more to the base's dtype. On the base that all τᵢ come from this is
    ``isthmus.merge([θ₁, ...], base=θ₀, method="task_arithmetic", weights=[c₁, ...])``, to the bit.

    Floating-point and complex entries have task vectors. Integer and boolean entries must be equal in base and model,
    ``num_batches_tracked`` aside, and are the base's after ``apply_to``. Models must not change while they are held.
    """

    def __init__(self, base: Source, model: Source) -> None:
        """Hold the task vector from ``base`` to ``model``.

        Args:
            base: a module, a state dict, a ``FlatState``, or the path of a safetensors file.
            model: the model that was trained from it.

        Raises:
            InputError: their entries do not agree, with a list of all that do not.
            FileError: a file is missing or not a safetensors file.
        """
        origin, trained = read_model(base, "the base"), read_model(model, "the model")
        self._entries = find_entries([trained], origin, origin)
        self._lead = origin
        self._terms = {next(_serials): _Term(1.0, _Difference(origin, trained))}

    @classmethod
    def from_state_dict(cls, state: Source) -> TaskVector:
        """A task vector from its own tensors by key, such as an adapter's.

        Raises:
            InputError: an entry is not a plain tensor.
            FileError: a file is missing or not a safetensors file.
        """
        vector = cls.__new__(cls)
        vector._lead = read_model(state, "the task vector")
        vector._entries = find_entries([vector._lead], None, vector._lead)
        vector._terms = {next(_serials): _Term(1.0, _Difference(None, vector._lead))}
        return vector

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TaskVector:
        """Read a task vector that ``save`` wrote.

        Raises:
            FileError: the file is missing or not a safetensors file.
        """
        from isthmus.io import load_metadata, load_state

        state = load_state(path)
        for key, first in json.loads(load_metadata(path).get("ties", "{}")).items():
            state[key] = state[first]
        return cls.from_state_dict(state)

    def _with(self, terms: Mapping[int, _Term]) -> TaskVector:
        """The same entries with other terms; a coefficient of zero ends a term."""
        vector = TaskVector.__new__(TaskVector)
        vector._entries, vector._lead = self._entries, self._lead
        vector._terms = {key: term for key, term in terms.items() if term.coefficient != 0}
        return vector

    @property
    def keys(self) -> list[str]:
        """The canonical keys that have a task vector, sorted; of tied ones the first."""
        return self._entries.merged

    def __add__(self, other: TaskVector | float) -> TaskVector:
        if isinstance(other, int | float) and other == 0:  # where sum() begins
            return self
        if not isinstance(other, TaskVector):
            return NotImplemented
        self._check_alike(other)
        terms = dict(self._terms)
        for key, (coefficient, difference) in other._terms.items():
            known = terms[key].coefficient if key in terms else 0.0
            terms[key] = _Term(known + coefficient, difference)
        return self._with(terms)

    __radd__ = __add__

    def __neg__(self) -> TaskVector:
        return self * -1.0

    def __sub__(self, other: TaskVector) -> TaskVector:
        if not isinstance(other, TaskVector):
            return NotImplemented
        return self + -other

    def __mul__(self, factor: float) -> TaskVector:
        if not isinstance(factor, int | float):
            return NotImplemented
        return self._scaled(lambda coefficient: coefficient * factor, f"multiplied by {factor}")

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> TaskVector:
        if not isinstance(divisor, int | float):
            return NotImplemented
        if divisor == 0:
            raise InputError("a task vector cannot be divided by 0.")
        return self._scaled(lambda coefficient: coefficient / divisor, f"divided by {divisor}")

    def __iter__(self) -> Iterator[str]:
        merged = set(self.keys)
        return (key for key, first in self._entries.first.items() if first in merged)

    def __contains__(self, key: object) -> bool:
        return key in set(self)

    def __getitem__(self, key: str) -> Tensor:
        """The tensor of a key, computed now; a ``KeyError`` for a key that has none."""
        if key not in self:
            raise KeyError(key)
        return self._compute(self._entries.first[key])

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors, computed now, by canonical key; tied keys have one tensor."""
        computed = {key: self._compute(key) for key in self.keys}
        return {key: computed[first] for key, first in self._entries.first.items() if first in computed}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tensors as a safetensors file, in the type in which they are computed; its metadata has the ties.

        Raises:
            FileError: the file could not be written.
        """
        from isthmus.io import save_state

        state = self.state_dict()
        ties = {key: first for key, first in self._entries.first.items() if key in state and key != first}
        save_state(path, state, {"ties": json.dumps(ties)})

    def apply_to(self, base: Source, *, backend: str = "auto") -> dict[str, Tensor]:
        """A new state dict: ``base`` plus this task vector, with the key order, dtypes, devices and ties of ``base``.

        Args:
            base: a model with the same tensors, not necessarily the one that the task vector came from.
            backend: as for ``isthmus.ops.lerp``.

        Raises:
            InputError: the entries do not agree.
            FileError: a file is missing or not a safetensors file.
        """
        origin = read_model(base, "the base")
        exact = {key: tensor for key, tensor in origin.tensors.items() if not _has_task_vector(tensor)}
        own = {key: tensor for key, tensor in self._lead.tensors.items() if _has_task_vector(tensor)}
        held = Model("the task vector", {**exact, **own}, "", {}, [*exact, *own])
        entries = find_entries([held], origin, origin)
        result = {
            key: value.clone()
            if (value := entries.copied.get(key)) is not None
            else torch.empty_like(origin.tensors[key])
            for key in entries.rules
        }
        keys = entries.merged
        with torch.no_grad():
            if self._terms and all(_is_from(term.difference.base, origin, keys) for term in self._terms.values()):
                for places in ops.by_device([origin.tensors[key] for key in keys]):
                    here = [keys[place] for place in places]
                    ops.consensus(
                        [
                            [term.difference.model.tensors[key].to(origin.tensors[key].device) for key in here]
                            for term in self._terms.values()
                        ],
                        [term.coefficient for term in self._terms.values()],
                        base=[origin.tensors[key] for key in here],
                        out=[result[key] for key in here],
                        backend=backend,
                        sparsify="none",
                        majority_sign_method="none",
                        merge_func="sum",
                    )
            else:
                for key in keys:
                    tensor = origin.tensors[key]
                    delta = self._compute(self._entries.first[key]).to(tensor.device)
                    ops.weighted_sum([tensor, delta], [1.0, 1.0], out=result[key], backend=backend)
        return {key: result[first] for key, first in entries.first.items()}

    def norm(self) -> float:
        """‖τ‖ over all entries, in float64."""
        return math.sqrt(self.dot(self))

    def dot(self, other: TaskVector) -> float:
        """⟨τ, τ'⟩ over all entries, in float64; of complex entries the real part.

        Raises:
            InputError: the task vectors do not have the same tensors.
        """
        self._check_alike(other)
        dots = []
        for key in self.keys:
            mine = self._compute(key)
            theirs = mine if other is self else other._compute(key).to(mine.device)
            dots.append(float(ops.gram([mine, theirs])[0, 0, 1]))
        return math.fsum(dots)

    def cosine(self, other: TaskVector) -> float:
        """The cosine of the angle between two task vectors; NaN if one is zero.

        Raises:
            InputError: the task vectors do not have the same tensors.
        """
        norms = self.norm() * other.norm()
        return max(-1.0, min(1.0, self.dot(other) / norms)) if norms else math.nan

    def __repr__(self) -> str:
        terms = " + ".join(
            f"{coefficient:g} · ({model.name}{f' − {base.name}' if base else ''})"
            for coefficient, (base, model) in self._terms.values()
        )
        return f"TaskVector({terms or 0}, {len(self.keys)} tensors)"

    def _scaled(self, change: Callable[[float], float], what: str) -> TaskVector:
        terms = {key: _Term(change(coefficient), difference) for key, (coefficient, difference) in self._terms.items()}
        if not all(math.isfinite(term.coefficient) for term in terms.values()):
            raise InputError(f"a task vector cannot be {what}: its coefficients must stay finite.")
        return self._with(terms)

    @torch.no_grad()
    def _compute(self, key: str) -> Tensor:
        """Σ cᵢ (θᵢ − θ₀) for a first alias."""
        like = self._lead.tensors[key]
        deltas = []
        for base, model in (term.difference for term in self._terms.values()):
            tensors = [part.tensors[key].to(like.device) for part in (model, base) if part is not None]
            wide = _wide([tensor.dtype for tensor in tensors])
            out = torch.empty(like.shape, dtype=wide, device=like.device)
            deltas.append(ops.weighted_sum(tensors, [1.0, -1.0][: len(tensors)], out=out))  # by ±1: rounds once
        if not deltas:
            return torch.zeros(like.shape, dtype=_wide([like.dtype]), device=like.device)
        out = torch.empty(like.shape, dtype=_wide([delta.dtype for delta in deltas]), device=like.device)
        return ops.weighted_sum(deltas, [term.coefficient for term in self._terms.values()], out=out)

    def _check_alike(self, other: TaskVector) -> None:
        mine, theirs = (vector._shapes() for vector in (self, other))
        different = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
        if different:
            raise InputError(
                f"the task vectors have different tensors or ties: {', '.join(map(repr, different))}. "
                "Combine task vectors of one architecture."
            )

    def _shapes(self) -> dict[str, tuple[torch.Size, str]]:
        """The shape and the first alias of every key that has a task vector."""
        keys, first = set(self.keys), self._entries.first
        return {key: (self._lead.tensors[key].shape, alias) for key, alias in first.items() if alias in keys}


def _is_from(base: Model | None, origin: Model, keys: list[str]) -> bool:
    """Whether a task vector was measured from the very tensors of ``origin``."""
    if base is None:
        return False
    pairs = ((base.tensors.get(key), origin.tensors[key]) for key in keys)
    return all(
        x is not None and (x.data_ptr(), x.dtype, x.shape, x.stride()) == (y.data_ptr(), y.dtype, y.shape, y.stride())
        for x, y in pairs
    )


def _has_task_vector(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(dtypes: list[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes, torch.float32)
