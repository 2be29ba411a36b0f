"""Load what is compiled, ahead of time or when it is first used, and say what is missing and why."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch

from .errors import BackendError

REBUILD = "Reinstall isthmus where a C++17 compiler is at hand (pip install --force-reinstall --no-deps isthmus)"

GET_TRITON = "Install triton and a C compiler, which it needs where it runs (pip install triton; apt install gcc)"


@functools.cache
def load_cpu() -> tuple[ModuleType | None, str]:
    """The C++ extension with its instruction set chosen, or ``None``; and why, in a sentence without a full stop."""
    try:
        from . import _cpu
    except ImportError as error:
        return None, f"the C++ extension isthmus._cpu could not be loaded ({error})"
    wanted = os.environ.get("ISTHMUS_ISA")
    if wanted:
        supported = dict(_cpu.instruction_sets())
        if not supported.get(wanted):
            known = ", ".join(name for name, runs in supported.items() if runs)
            why = "this processor does not run it" if wanted in supported else "no such set was compiled in"
            return None, f"ISTHMUS_ISA={wanted} was asked for, but {why} (available here: {known})"
        _cpu.use_instruction_set(wanted)
    _cpu.accept_tensors(torch.Tensor, torch.nn.Parameter, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
    return _cpu, f"instruction set {_cpu.instruction_set()}"


def cpu() -> ModuleType:
    """The C++ extension, or a ``BackendError`` that says why there is none."""
    module, reason = load_cpu()
    if module is None:
        raise BackendError(f"backend 'cpp' is not available: {reason}. {REBUILD}, or use backend='reference'.")
    return module


@functools.cache
def load_triton() -> tuple[ModuleType | None, str]:
    """The ops on Triton kernels, or ``None``; and why, in a sentence without a full stop."""
    try:
        module = importlib.import_module("isthmus._gpu.triton")
    except ImportError as error:
        return None, f"Triton could not be loaded ({error})"
    if torch.cuda.is_available() and not module.INTERPRETED:
        try:
            module.load_driver()
        except Exception as error:  # of whatever kind: no kernel could be launched
            return None, f"Triton's driver could not be built or loaded ({str(error).rstrip('.')})"
    return module, f"Triton {module.VERSION}{' in its interpreter' if module.INTERPRETED else ''}"


def triton() -> ModuleType:
    """The ops on Triton kernels, or a ``BackendError`` that says why there are none."""
    module, reason = load_triton()
    if module is None:
        raise BackendError(f"backend 'triton' is not available: {reason}. {GET_TRITON}, or use another backend.")
    return module


@functools.cache
def load_cuda() -> tuple[ModuleType | None, str]:
    """The ops on CUDA C++ kernels, or ``None``; and why, in a sentence without a full stop."""
    try:
        module = importlib.import_module("isthmus._gpu.cuda")
    except ImportError as error:
        return None, f"the CUDA extension isthmus._cuda could not be loaded ({error})"
    return module, f"built for {', '.join(module.ARCHITECTURES)}"


def cuda() -> ModuleType:
    """The ops on CUDA C++ kernels, or a ``BackendError`` that says why there are none."""
    module, reason = load_cuda()
    if module is None:
        raise BackendError(
            f"backend 'cuda' is not available: {reason}. Reinstall isthmus where a CUDA compiler is at hand "
            "(ISTHMUS_CUDA=1 pip install --force-reinstall --no-deps isthmus), or use backend='triton'."
        )
    return module
