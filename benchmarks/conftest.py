"""How a case is measured, and the table that a run ends with."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus import ops
from isthmus.train import Data, load_data

Call = Callable[[], object]
_cases: list[dict[str, Any]] = []

COPY_ELEMENTS = 25_600_000  # float32: 102 MB read and as much written, far beyond the caches


def seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.fixture(scope="session")
def copies() -> list[Call]:
    """Two ways to copy warm buffers: torch's, and ours, which writes past the caches."""
    source, target = torch.ones(COPY_ELEMENTS), torch.ones(COPY_ELEMENTS)
    return [lambda: target.copy_(source), lambda: ops.lerp(source, source, 0.0, out=target)]


@pytest.fixture
def measure(benchmark: Any, copies: list[Call], request: pytest.FixtureRequest) -> Callable[..., None]:
    """Time a call, its peers and the copies in turn, round by round, and keep the medians.

    With ``bytes_moved`` the case's figure is its bandwidth as a fraction of the copy bandwidth: the better of the two
    copies' medians. Each peer adds how many times faster the call is. A call that is short is repeated within a round;
    peers that are slow take part in the first ``peer_rounds`` rounds only.
    """

    def run(
        call: Call,
        *,
        bytes_moved: int | None = None,
        peers: dict[str, Call] | None = None,
        rounds: int = 9,
        peer_rounds: int | None = None,
        repeat: int = 1,
    ) -> None:
        def repeated(function: Call) -> Call:
            return lambda: [function() for _ in range(repeat)]

        others = {name: repeated(peer) for name, peer in (peers or {}).items()}
        copying = copies if bytes_moved is not None else []
        for function in [*copying, *others.values(), call]:
            function()  # warm
        times: dict[str, list[float]] = {name: [] for name in others} | {str(i): [] for i in range(len(copying))}

        def beside() -> None:
            for i, copy in enumerate(copying):
                times[str(i)].append(seconds(copy))
            for name, peer in others.items():
                if peer_rounds is None or len(times[name]) < peer_rounds:
                    times[name].append(seconds(peer))

        benchmark.pedantic(repeated(call), setup=beside, rounds=rounds)
        median = benchmark.stats.stats.median / repeat
        case: dict[str, Any] = {"case": request.node.name.removeprefix("bench_"), "median_s": median, "speedups": {}}
        if bytes_moved is not None:
            best = min(statistics.median(times[str(i)]) for i in range(len(copying)))
            case["bytes_moved"] = bytes_moved
            case["copy_bandwidth"] = 8 * COPY_ELEMENTS / best
            case["ratio_to_copy"] = bytes_moved / median / case["copy_bandwidth"]
        for name in others:
            case["speedups"][name] = statistics.median(times[name]) / repeat / median
        benchmark.extra_info.update(case)
        _cases.append(case)

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _cases:
        return
    terminalreporter.section("isthmus: medians")
    terminalreporter.line(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    terminalreporter.line(f"{'case':44} {'median':>10} {'GB/s':>7} {'copy':>7} {'ratio':>6}  times faster than")
    for case in _cases:
        bandwidth = ""
        if "bytes_moved" in case:
            achieved = case["bytes_moved"] / case["median_s"]
            bandwidth = f"{achieved / 1e9:7.1f} {case['copy_bandwidth'] / 1e9:7.1f} {case['ratio_to_copy']:6.2f}"
        peers = ", ".join(f"{name} {factor:.2f}" for name, factor in case["speedups"].items())
        terminalreporter.line(f"{case['case']:44} {case['median_s'] * 1e3:7.3f} ms {bandwidth:22}  {peers}")


@pytest.fixture(scope="session")
def fashion_mnist_root() -> Path:
    """The folder of Fashion-MNIST's IDX files."""
    root = os.environ.get("FASHION_MNIST")
    if root is None:
        pytest.skip("set FASHION_MNIST to the folder of its IDX files (Debian: the package dataset-fashion-mnist)")
    return Path(root)


@pytest.fixture(scope="session")
def fashion_mnist(fashion_mnist_root: Path) -> Data:
    return load_data("fashion-mnist", root=fashion_mnist_root)
