"""What would be compiled where there is a GPU: kernels are launched on tensors of the CPU, and launches are recorded.

Triton asks a hook before it compiles for a launch; here the hook notes what was asked for and declines. So functions
that launch kernels run as they do on a GPU, with the specialisations that their arguments have there, and nothing is
computed. For a process without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from isthmus import kernels

WARP = 32


@dataclass(eq=False)
class Variant:
    """A kernel with everything that its machine code depends on but the architecture.

    Attributes:
        kernel: its module in ``isthmus.kernels`` and its name.
        constants: the values of its compile-time parameters.
        types: of its other parameters.
        options: that the launch chose: warps, stages, and whether multiplications and additions are fused.
        parts: what Triton compiles: the function, its signature, constants and attributes.
        call: the first call that launched it.
        usual: whether a usual call did.
    """

    kernel: str
    constants: dict[str, str]
    types: dict[str, str]
    options: dict[str, Any]
    parts: tuple[Any, dict[str, str], dict[Any, Any], dict[Any, Any]] = field(repr=False)
    call: str = ""
    usual: bool = False

    def shown(self) -> dict[str, Any]:
        """What is told of it."""
        names = ("kernel", "constants", "types", "options", "call", "usual")
        return {name: getattr(self, name) for name in names}


class Recorder:
    """Collects the variants of all launches since it was made; there is one in a process."""

    def __init__(self) -> None:
        self.variants: dict[tuple[Any, ...], Variant] = {}
        self.call: Any = None  # the one that is made now
        driver.set_active(_NoCard())
        knobs.runtime.jit_cache_hook = self._note

    def _note(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = f"{fn.module.rpartition('.')[2]}.{fn.name}"
        options = {
            name: compile[name]
            for name in ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion", "launch_cooperative_grid")
        }
        variant = self.variants.get((kernel, compile["key"]))
        if variant is None:
            function, signature, constants = fn.jit_function, compile["signature"], compile["constants"]
            names = function.arg_names
            variant = Variant(
                kernel,
                {names[path[0]]: str(value) for path, value in constants.items()},
                {name: type_ for name, type_ in signature.items() if type_ != "constexpr"},
                options,
                (function, signature, constants, compile["configs"][0]),
                self.call.label,
            )
            self.variants[kernel, compile["key"]] = variant
        variant.usual |= self.call.usual
        return True


class _NoCard:
    """Stands in for Triton's driver; nothing is launched."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, WARP)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launched() -> set[str]:
    """The kernels that the modules of ``isthmus.kernels`` launch, read from their sources: ``name[grid](...)``."""
    found = set()
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"isthmus.kernels.{info.name}")
        for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = node.func.value
                if isinstance(name, ast.Name) and hasattr(getattr(module, name.id, None), "arg_names"):
                    found.add(f"{info.name}.{name.id}")
    return found
