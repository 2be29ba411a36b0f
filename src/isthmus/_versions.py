"""Version counters of tensors that are written through their address.

Autograd notices an in-place write by a tensor's version counter. A write through an address raises no counter, and a
parameter that was made a view of a flat buffer by ``parameter.data = view`` has a counter of its own. Both are raised
here, so that a backward pass through overwritten values is an error and not a wrong gradient.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import increment_version

# storage address -> the tensors that view this storage with a counter of their own, by id (tensors do not compare)
_bound: dict[int, dict[int, weakref.ref[torch.Tensor]]] = {}


def bind(tensors: Iterable[torch.Tensor]) -> None:
    """Remember, as long as they live, that ``tensors`` view their storage with a version counter of their own."""
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        dead = functools.partial(_forget, address, id(tensor))
        _bound.setdefault(address, {})[id(tensor)] = weakref.ref(tensor, dead)


def unbind(tensors: Iterable[torch.Tensor]) -> None:
    """Forget what ``bind`` remembered; call it while ``tensors`` still view the bound storage."""
    for tensor in tensors:
        _forget(tensor.untyped_storage().data_ptr(), id(tensor))


def _forget(address: int, tensor: int, _: object = None) -> None:
    views = _bound.get(address, {})
    views.pop(tensor, None)
    if not views:
        _bound.pop(address, None)


def wrote(tensors: Sequence[torch.Tensor]) -> None:
    """Raise the version of ``tensors``, just written through their addresses, and of what is bound to their memory."""
    if not _bound and len(tensors) == 1 and not tensors[0].is_inference():  # the common case, without lists
        increment_version(tensors[0])
        return
    written = list(tensors)
    if _bound:
        for address in {tensor.untyped_storage().data_ptr() for tensor in tensors}:
            views = [view() for view in list(_bound.get(address, {}).values())]  # a view may die meanwhile
            written += (view for view in views if view is not None)
    increment_version([tensor for tensor in written if not tensor.is_inference()])
