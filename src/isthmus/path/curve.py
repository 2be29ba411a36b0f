r"""Curves through weight space that are bent to stay where the loss is low, and their shape.

A curve goes from A (t = 0) to B (t = 1) by way of one trained point :math:`\theta`: a quadratic Bezier curve, drawn
towards it, or a chain of two straight pieces, which passes through it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from isthmus import ops
from isthmus.errors import FileError, InputError
from isthmus.flat import FlatState

KINDS = ("bezier", "polygon")
POINTS = ("a", "theta", "b")  # what the three points are called in files and messages
METADATA = "isthmus_curve"  # the key of a file's metadata
SCHEMA = 1

# Lengths are integrals over [0, t], by Gauss-Legendre quadrature with so many nodes on each of so many pieces
NODES, PIECES = 8, 64


@dataclass(frozen=True, eq=False)
class Curve:
    r"""A curve between two models with one point that was trained.

    The quadratic Bezier curve and the one-bend polygonal chain of Garipov et al., "Loss Surfaces, Mode Connectivity,
    and Fast Ensembling of DNNs", arXiv 1802.10026, section 3:

    .. math::

        \phi_\text{bezier}(t) = (1 - t)^2 A + 2 t (1 - t)\, \theta + t^2 B, \qquad
        \phi_\text{polygon}(t) = \begin{cases}
            (1 - 2t)\, A + 2t\, \theta & t \le \tfrac12 \\ (2 - 2t)\, \theta + (2t - 1)\, B & t \ge \tfrac12.
        \end{cases}

    Attributes:
        kind: "bezier" or "polygon".
        a: model A, at t = 0.
        theta: the point between; of the same layout as A and B.
        b: model B, at t = 1.
        parameters: the canonical keys of the model's parameters, over which lengths are taken; by default all
            floating-point and complex entries.
        training: how the point was trained: settings, and the mean loss of the last steps.

    Raises:
        InputError: the kind is unknown, or the layouts differ.
    """

    kind: str
    a: FlatState
    theta: FlatState
    b: FlatState
    parameters: tuple[str, ...] = ()
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_kind(self.kind)
        for name, state in (("theta", self.theta), ("b", self.b)):
            self.a.layout.check(state.layout, name=name, expected="a")

    def at(self, t: float, out: FlatState | None = None, *, backend: str = "auto") -> FlatState:
        """The model at t, written in one pass; at 0 and 1 it is A and B to the bit.

        Floating-point and complex entries, running statistics of normalisation layers too, are combined; integer and
        boolean entries are those of A, and at t = 1 those of B.

        Args:
            t: the place on the curve, from 0 to 1.
            out: where to write, a state of the same layout; by default a new one.
            backend: as for ``isthmus.ops.lerp``.

        Raises:
            InputError: t is not in [0, 1], or the layout of ``out`` differs.
        """
        if not 0 <= t <= 1:
            raise InputError(f"t={t} is not on the curve, which runs from t = 0 (A) to t = 1 (B).")
        if out is None:
            out = FlatState.zeros(self.a.layout, device=self.a.device)
        if t in (0, 1):
            out.copy_(self.b if t else self.a)
            return out
        self.a.layout.check(out.layout, name="out", expected="the curve")
        combine(self.kind, self.a.averaged, self.theta.averaged, self.b.averaged, t, out.averaged, backend)
        for dtype, buffer in out.buffers.items():
            if not (dtype.is_floating_point or dtype.is_complex):
                buffer.copy_(self.a.buffers[dtype])
        return out

    def positions(self, ts: ArrayLike) -> NDArray[np.float64]:
        r"""How far along the curve each t lies, :math:`s(t) = \int_0^t \lVert \phi'(\tau) \rVert \, \mathrm d\tau`.

        In float64, over the parameters. With :math:`u = \theta - A` and :math:`v = B - \theta`, the derivative of the
        Bezier curve is :math:`2 (1 - t) u + 2 t v`, whose norm needs no more than the three products of u and v; its
        integral is taken by Gauss-Legendre quadrature. Of a polygonal chain the length is exact.

        Args:
            ts: places on the curve, of any shape.
        """
        places = np.asarray(ts, np.float64)
        uu, uv, vv = self._products
        if self.kind == "polygon":
            return 2 * (np.minimum(places, 0.5) * math.sqrt(uu) + np.maximum(places - 0.5, 0) * math.sqrt(vv))
        nodes, weights = _quadrature()
        inner = places[..., None] * nodes
        outer = 1 - inner
        squares = outer * outer * uu + 2 * inner * outer * uv + inner * inner * vv
        length: NDArray[np.float64] = 2 * places * (np.sqrt(np.maximum(squares, 0)) @ weights)
        return length

    @property
    def length(self) -> float:
        """The length of the curve, over the parameters."""
        return float(self.positions(1.0))

    @cached_property
    def _products(self) -> tuple[float, float, float]:
        """⟨u, u⟩, ⟨u, v⟩ and ⟨v, v⟩ with u = θ − A and v = B − θ, over the parameters, in float64."""
        totals = torch.zeros(3, dtype=torch.float64)
        for key in self.parameters or [key for key in self.a if _is_inexact(self.a[key])]:
            a, theta, b = (_double(state[key]) for state in (self.a, self.theta, self.b))
            u, v = theta - a, b - theta
            totals += torch.stack([u @ u, u @ v, v @ v]).cpu()
        uu, uv, vv = totals.tolist()
        return uu, uv, vv

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the curve as one safetensors file, whole or not at all.

        The tensors of the three points are called "a.", "theta." and "b." with their keys; the metadata has the rest.

        Raises:
            FileError: the file could not be written.
        """
        from isthmus.io import save_state

        entries = self.a.layout.entries
        first = {entry: key for key, entry in reversed(entries.items()) if entry.numel}
        facts = {
            "schema": SCHEMA,
            "kind": self.kind,
            "parameters": self.parameters,
            "training": self.training,
            "ties": {key: first[entry] for key, entry in entries.items() if first.get(entry, key) != key},
        }
        state = {
            f"{name}.{key}": tensor
            for name, point in zip(POINTS, (self.a, self.theta, self.b), strict=True)
            for key, tensor in point.to_state_dict().items()
        }
        save_state(path, state, {METADATA: json.dumps(facts)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Curve:
        """Read what ``save`` wrote, onto the CPU.

        Raises:
            FileError: the file is missing, damaged, or not that of a curve.
        """
        from isthmus.io import load_metadata, load_state

        text = load_metadata(path).get(METADATA)
        if text is None:
            raise FileError(f"{os.fspath(path)} holds no curve; pass a file that Curve.save wrote.")
        try:
            facts = json.loads(text)
            if facts["schema"] != SCHEMA:
                raise FileError(
                    f"{os.fspath(path)} holds a curve of schema {facts['schema']}, expected {SCHEMA}; read it with the "
                    "version of isthmus that wrote it."
                )
            tensors = load_state(path)
            a, theta, b = (_point(tensors, name, facts["ties"]) for name in POINTS)
            return cls(facts["kind"], a, theta, b, tuple(facts["parameters"]), facts["training"])
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"the curve in {os.fspath(path)} is damaged ({type(error).__name__}: {error}).") from error


def check_kind(kind: str) -> None:
    """Raise an ``InputError`` for a kind of curve that is not known."""
    if kind not in KINDS:
        raise InputError(f"kind={kind!r} is no kind of curve; expected {' or '.join(map(repr, KINDS))}.")


def point_weights(kind: str, t: float) -> tuple[float, float, float]:
    """The weights of A, θ and B at t; that of θ is also the derivative of φ(t) in θ."""
    if kind == "polygon":
        return max(1 - 2 * t, 0.0), 2 * min(t, 1 - t), max(2 * t - 1, 0.0)
    return (1 - t) ** 2, 2 * t * (1 - t), t**2


def combine(
    kind: str,
    a: Sequence[Tensor],
    theta: Sequence[Tensor],
    b: Sequence[Tensor],
    t: float,
    out: Sequence[Tensor],
    backend: str,
) -> None:
    """Write φ(t) of lists of tensors, in one pass; polygonal chains pass through their three points exactly."""
    if kind == "bezier":
        ops.weighted_sum([a, theta, b], point_weights(kind, t), out=out, backend=backend)
    elif t <= 0.5:
        ops.lerp(a, theta, 2 * t, out=out, backend=backend)
    else:
        ops.lerp(theta, b, 2 * t - 1, out=out, backend=backend)


def _quadrature() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    starts = np.arange(PIECES)[:, None]
    return ((starts + (nodes + 1) / 2) / PIECES).ravel(), np.tile(weights / (2 * PIECES), PIECES)


def _point(tensors: Mapping[str, Tensor], name: str, ties: Mapping[str, str]) -> FlatState:
    state = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
    return FlatState.from_state_dict(state | {key: state[first] for key, first in ties.items()}, name=name)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _double(tensor: Tensor) -> Tensor:
    """A vector of float64, of complex numbers as pairs."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten()
