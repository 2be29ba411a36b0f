"""What errors and warnings call the models: by the op's own arguments, unless its caller knows them by other names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_callers: ContextVar[tuple[list[str], str | None] | None] = ContextVar("_callers", default=None)


@contextmanager
def naming(models: Sequence[str], base: str | None) -> Iterator[None]:
    """Within this context, errors and warnings about values call the models, in order, and the base by these names."""
    token = _callers.set((list(models), base))
    try:
        yield
    finally:
        _callers.reset(token)


def own_labels(count: int) -> list[str]:
    """What the models are called by where they stand among the arguments."""
    return [f"tensors[{model}]" for model in range(count)]


def called(labels: Sequence[str]) -> list[str]:
    """What the caller calls the operands that ``labels`` name, of which a base is the first; else the labels."""
    names = _callers.get()
    if names is None:
        return list(labels)
    models, base = names
    return [base or "base", *models] if labels[0] == "base" else models
