"""Shared fixtures: every backend and instruction set runs through the same tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from on_card import OnCard

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are imported

from isthmus import _native
from isthmus.errors import BackendError


def _patch_interpreter() -> None:
    """Let Triton's interpreter patch its language when a kernel is launched, not whenever that calls a function.

    It would do so anew for each call, to no effect but that most of its time goes there. What Triton's own functions
    use, once patched, stays so.
    """
    from triton.runtime import interpreter

    patched = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module.startswith("triton.") and module not in patched:
            patched.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    _patch_interpreter()

BACKENDS = ["reference", "cpp-base", "cpp-v3", "cpp-v4", "triton"]
if torch.cuda.is_available() and _native.load_cuda()[0] is not None:
    BACKENDS.append("cuda")


@pytest.fixture(scope="session", autouse=True)
def on_card() -> Iterator[None]:
    """On a machine with a GPU, run kernels there for tensors of the CPU, of which tests are made."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            for name, (module, _) in {"triton": _native.load_triton(), "cuda": _native.load_cuda()}.items():
                if module is not None and not getattr(module, "INTERPRETED", False):
                    moving = OnCard(module, "cuda")
                    patch.setattr(_native, name, lambda moving=moving: moving)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """CUDA C++ has kernels for some ops alone, and says so of others."""
    try:
        return (yield)
    except BackendError as error:
        params = (getattr(item, "callspec", None) and item.callspec.params) or {}
        if "cuda" in (params.get("backend"), params.get("compiled")):
            pytest.skip(str(error))
        raise


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name to pass as ``backend=``, with the instruction set forced where the backend is compiled."""
    yield from _forced(request.param)


@pytest.fixture(params=BACKENDS[1:])
def compiled(request: pytest.FixtureRequest) -> Iterator[str]:
    """Like ``backend``, without the reference: for tests that compare with it."""
    yield from _forced(request.param)


def _forced(param: str) -> Iterator[str]:
    name, _, isa = param.partition("-")
    if name == "reference":
        yield name
        return
    if name in ("triton", "cuda"):
        module, reason = _native.load_triton() if name == "triton" else _native.load_cuda()
        if module is None:
            pytest.skip(reason)
        yield name
        return
    module, reason = _native.load_cpu()
    if module is None:
        pytest.skip(reason)
    supported = dict(module.instruction_sets())
    if not supported.get(isa):
        pytest.skip(
            f"instruction set {isa} is {'not supported by this processor' if isa in supported else 'not built'}"
        )
    before = module.instruction_set()
    module.use_instruction_set(isa)
    assert module.instruction_set() == isa  # the force worked
    yield name
    module.use_instruction_set(before)


@pytest.fixture(params=["auto", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """What "auto" takes, and Triton's kernels: for tests of what is built on ops."""
    yield from _forced(request.param) if request.param == "triton" else [request.param]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what would be run twice or not at all: kernels of a GPU know no threads, and not all ops have one."""

    def runs(item: pytest.Item) -> bool:
        params = (getattr(item, "callspec", None) and item.callspec.params) or {}
        on_gpu = {"triton", "cuda"} & {params.get("backend"), params.get("compiled")}
        return not on_gpu or (params.get("threads", 1) == 1 and item.get_closest_marker("cpu_only") is None)

    left_out = [item for item in items if not runs(item)]
    items[:] = [item for item in items if runs(item)]
    config.hook.pytest_deselected(items=left_out)
