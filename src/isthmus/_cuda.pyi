"""The CUDA extension: addresses in the memory of a device, 0 for what is not given; no checks but of launches.

A queue is the number of a device and the address of one of its streams.
"""

import enum

Queue = tuple[int, int]

class LaunchError(RuntimeError): ...

class Dtype(enum.Enum):
    f64 = ...
    f32 = ...
    bf16 = ...
    f16 = ...

class Vote(enum.Enum):
    none = ...
    total = ...
    weighted_total = ...
    frequency = ...

class MergeFunc(enum.Enum):
    sum = ...
    mean = ...
    max = ...

def architectures() -> list[str]: ...
def device_count() -> int: ...

class Rows:
    def __init__(
        self,
        *,
        addresses: int,
        numel: int,
        first_block: int,
        row_of_block: int,
        rows: int,
        blocks: int,
        block: int,
        width: int,
        dtype: Dtype,
        out_dtype: Dtype,
    ) -> None: ...

def lerp(rows: Rows, weights: int, per_row: bool, queue: Queue) -> None: ...
def weighted_sum(rows: Rows, weights: int, per_row: bool, queue: Queue) -> None: ...

class Plan:
    def __init__(
        self,
        *,
        based: bool,
        vote: Vote,
        merge: MergeFunc,
        weights: int,
        divisors: int,
        scaling: int,
        rescale: int,
        keep: tuple[int, int],
        drop: tuple[int, int],
        lengths: int,
        first_group: int,
        keys: int,
        density: int,
        starts: int,
        inverse: bool,
    ) -> None: ...

class Sweep:
    def __init__(
        self,
        *,
        zero: int = 1,
        write: bool = True,
        by_row: bool = False,
        count: int = 0,
        decide: int = 0,
        mark: int = 0,
        marked: int = 0,
        kept: int = 0,
        counts: int = 0,
    ) -> None: ...

def mark_words(rows: Rows) -> int: ...
def consensus(rows: Rows, plan: Plan, sweep: Sweep, queue: Queue) -> None: ...

most_small: int

class Ranking:
    def __init__(
        self,
        *,
        based: bool,
        whole: bool,
        exact: bool,
        models: int,
        groups: int,
        ranks: int,
        lengths: int,
        first_group: int,
        row_starts: int,
        k: int,
        large: list[tuple[int, int, int, int, int]],  # group, first block, blocks, elements, blocks before
        large_on_device: int,
        result: list[int],  # value, index, above, equal, nonfinite
    ) -> None: ...

def select_workspace(rows: Rows, ranking: Ranking) -> int: ...
def select(rows: Rows, ranking: Ranking, workspace: int, queue: Queue) -> None: ...

class Stack:
    def __init__(
        self,
        *,
        problems: int,
        rows: int,
        cols: int,
        matrices: int,
        dtype: Dtype,
        maximize: bool,
        starts: int,
        columns: int,
        u: int,
        v: int,
        primal: int,
        dual: int,
        faults: int,
    ) -> None: ...

def assign_workspace(stack: Stack) -> int: ...
def assign(stack: Stack, workspace: int, queue: Queue) -> None: ...
def assign_nearest(stack: Stack, solved: int, workspace: int, queue: Queue) -> None: ...
