"""Train, merge and scan pairs over a grid of noise scales, in a folder from which an interrupted sweep goes on.

A sweep's folder holds ``sweep.json`` (its configuration) and, for every pair, ``pairs/scale<i>/pair<k>/`` with the pair
as ``Pair.save`` writes it and its evaluation, ``record.json``. A pair with a record is finished.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from isthmus import __version__, norms
from isthmus.errors import FileError, InputError, IsthmusError
from isthmus.flat import FlatState
from isthmus.io import read_json, write_json
from isthmus.path import Evaluator, scan_line

from .augment import Augmentation
from .config import TrainConfig
from .data import Data, load_data
from .factory import nearest
from .models import build_model
from .pair import SHARED, Pair, train_pair, train_pairs
from .results import Metrics, PairRecord, Scale, Status, SweepResult

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

Progress = Callable[[int, int], None]

SCHEMA = 1  # of sweep.json and record.json
AXES = ("lr", "batch_size", "momentum", "weight_decay", "augmentation")
TOGETHER = 8  # pairs trained at once on a CUDA device, unless asked otherwise; not measured
BN_SAMPLES = 8192  # training examples, unaugmented, for BatchNorm statistics: 32 batches of 256


@dataclass(frozen=True)
class SweepConfig:
    """A grid of training configurations, and how many pairs to train at each of its points.

    Args:
        base: configuration of every pair but for the axes of the grid. Pair k has seed ``base.seed + k`` at every
            point, so that points can be compared pair by pair. Where ``base.threads`` is None it becomes 1: the bits of
            a result depend on the number of threads, and many pairs are trained fastest side by side.
        lr: learning rates; as for the other axes, empty stands for the base's value alone.
        batch_size: batch sizes.
        momentum: momenta.
        weight_decay: weight decays.
        augmentation: augmentations, each an ``Augmentation`` or a mapping of its fields.
        pairs: pairs per point.
        points: points of each scan, ends and midpoint included.

    Raises:
        InputError: a value is out of range, or the optimiser has no noise scale (see ``TrainConfig.noise_scale``).
    """

    base: TrainConfig
    lr: Sequence[float] = ()
    batch_size: Sequence[int] = ()
    momentum: Sequence[float] = ()
    weight_decay: Sequence[float] = ()
    augmentation: Sequence[Augmentation | Mapping[str, Any]] = ()
    pairs: int = 10
    points: int = 21

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", replace(self.base, threads=self.base.threads or 1))
        for name, least in (("pairs", 1), ("points", 3)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} is {value!r}, expected an integer of at least {least}.")
        for axis in AXES:
            values = getattr(self, axis)
            if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
                raise InputError(f"grid: {axis} is {values!r}, expected a list of values.")
            # A TrainConfig checks each value and gives it its type.
            valid = [getattr(replace(self.base, **{axis: value}), axis) for value in values]
            if twice := next((value for i, value in enumerate(valid) if value in valid[:i]), None):
                raise InputError(f"grid: {axis} has {twice} twice; leave one out.")
            object.__setattr__(self, axis, tuple(valid) or (getattr(self.base, axis),))
        for config in self.configs:
            config.noise_scale  # noqa: B018  (raises where there is none)

    @property
    def configs(self) -> tuple[TrainConfig, ...]:
        """The configuration at every point of the grid, with the seed of pair 0; the last axis varies fastest."""
        grid = itertools.product(*(getattr(self, axis) for axis in AXES))
        return tuple(replace(self.base, **dict(zip(AXES, values, strict=True))) for values in grid)

    @property
    def scales(self) -> tuple[Scale, ...]:
        """The points of the grid, in the order of ``configs``."""
        return tuple(
            Scale(c.noise_scale.value, c.lr, c.batch_size, c.momentum, c.weight_decay, _changed(c.augmentation))
            for c in self.configs
        )

    @property
    def noise_formula(self) -> str:
        """The formula of the noise scale, for people."""
        noise = self.base.noise_scale
        if noise.rule == "adam":
            return "lr / √(batch size)"
        power = "" if noise.exponent == 1 else f"^{noise.exponent:g}"
        return f"lr / (batch size · (1 − momentum){power})"

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain values: ``pairs``, ``points``, ``base`` and ``grid``, as in a TOML file."""
        grid = {axis: [_plain(value) for value in getattr(self, axis)] for axis in AXES}
        return {"pairs": self.pairs, "points": self.points, "base": self.base.to_dict(), "grid": grid}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SweepConfig:
        """The inverse of ``to_dict``; what is left out has its default.

        Raises:
            InputError: a name is unknown, or a value is out of range.
        """
        own = [field.name for field in fields(cls) if field.name not in AXES and field.default is not MISSING]
        _check_names(values, [*own, "base", "grid"], "the sweep's configuration")
        for name in ("base", "grid"):
            if not isinstance(values.get(name, {}), Mapping):
                raise InputError(f"{name} is {values[name]!r}, expected a table of names and values.")
        grid = values.get("grid", {})
        _check_names(grid, AXES, "grid")
        rest = {name: values[name] for name in own if name in values}
        return cls(base=TrainConfig.from_dict(values.get("base", {})), **grid, **rest)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> SweepConfig:
        """Read a TOML file with ``pairs``, ``points`` and the tables ``[base]`` and ``[grid]``.

        Raises:
            FileError: the file is missing or not TOML.
            InputError: as ``from_dict``.
        """
        try:
            with open(path, "rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            raise FileError(f"could not read {os.fspath(path)}: {error.strerror}. Check the path.") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FileError(f"{os.fspath(path)} is not a TOML file: {error}.") from error
        return cls.from_dict(values)


def run_sweep(
    config: SweepConfig,
    out: str | os.PathLike[str],
    *,
    workers: int = 1,
    together: int | None = None,
    progress: Progress | None = None,
) -> SweepResult:
    """Train and evaluate every pair of a sweep that the folder ``out`` does not hold yet, and gather all of them.

    A pair that diverges or stays untrained is recorded as such and the sweep goes on. After an interrupt, an error or a
    kill, the same call goes on from the pairs that are finished. More pairs can be asked for in the same folder; any
    other change of the configuration is an error that names it. Results do not depend on ``workers``, and on
    ``together`` by rounding alone.

    Args:
        config: the grid.
        out: folder of the sweep; made if need be.
        workers: processes that train pairs side by side, each with ``config.base.threads`` threads. 1 trains in this
            process. With more, a script that calls this needs ``if __name__ == "__main__":``, as with every use of
            processes in Python.
        together: pairs of one batch size that are trained at once; see ``train_pairs``. None takes 8 on a CUDA device
            for models without convolutions, whose steps are too small to keep it busy, and else 1.
        progress: called as ``progress(pairs_done, pairs_in_all)``, first with those found in the folder.

    Raises:
        InputError: the folder belongs to a sweep of another configuration, or the configuration does not fit its data.
        FileError: the data are missing, or a file could not be read or written.
    """
    for name, count in (("workers", workers), ("together", 1 if together is None else together)):
        if count < 1:
            raise InputError(f"{name} is {count}, expected at least 1.")
    start = time.perf_counter()
    folder = Path(out)
    _claim(folder, config)
    jobs = [
        _Job(
            config=replace(train, seed=config.base.seed + pair),
            points=config.points,
            scale=scale,
            pair=pair,
            folder=folder / "pairs" / f"scale{scale:02d}" / f"pair{pair:02d}",
        )
        for pair in range(config.pairs)  # pair by pair, so that an interrupted sweep has some of every scale
        for scale, train in enumerate(config.configs)
    ]
    found = {(job.scale, job.pair): job.finished() for job in jobs}
    todo = [job for job in jobs if found[job.scale, job.pair] is None]
    done = len(jobs) - len(todo)
    if progress is not None:
        progress(done, len(jobs))
    groups = _grouped(todo, together or (TOGETHER if torch.device(config.base.device).type == "cuda" else 1))
    processes = min(workers, len(groups))
    worker = _Worker(config, stack_convolutions=together is not None)
    records = _run_here(groups, worker) if processes <= 1 else _run_in_processes(groups, worker, processes)
    for record in records:
        found[record.scale, record.pair] = record
        done += 1
        if progress is not None:
            progress(done, len(jobs))
    return SweepResult(
        config=config.to_dict(),
        noise_formula=config.noise_formula,
        scales=config.scales,
        records=tuple(record for _, record in sorted(found.items()) if record is not None),
        machine=_machine(config.base, workers),
        seconds=time.perf_counter() - start,
    )


@dataclass(frozen=True)
class _Job:
    """One pair to train and evaluate."""

    config: TrainConfig
    points: int
    scale: int
    pair: int
    folder: Path

    @property
    def digest(self) -> str:
        """Of everything that decides the record."""
        settings = f"{self.config.digest} points={self.points} bn={BN_SAMPLES} schema={SCHEMA}"
        return hashlib.sha256(settings.encode()).hexdigest()

    def finished(self) -> PairRecord | None:
        """The record in the folder, if there is one of this job."""
        path = self.folder / "record.json"
        if not path.is_file():
            return None
        values = cast(dict[str, Any], read_json(path))
        return PairRecord.from_dict(values) if values.get("digest") == self.digest else None

    def trained(self) -> Pair | None:
        """The pair in the folder, if there is a finished one of this configuration."""
        path = self.folder / "pair.json"
        if not path.is_file() or cast(dict[str, Any], read_json(path)).get("digest") != self.config.digest:
            return None
        return Pair.load(self.folder)


class _StoppedError(Exception):
    """The sweep is being interrupted."""


class _Worker:
    """Does jobs of one sweep, with the data set loaded once.

    Args:
        sweep: the sweep.
        stack_convolutions: train the jobs of a group at once even if their models have convolutions.
    """

    def __init__(self, sweep: SweepConfig, *, stack_convolutions: bool) -> None:
        self._sweep = sweep
        self._stack_convolutions = stack_convolutions
        self.stop: Event | None = None

    @functools.cached_property
    def _data(self) -> Data:
        """The data set; every configuration of the sweep is checked against it before any pair is trained."""
        base = self._sweep.base
        data = load_data(base.data, device=base.device, **base.data_options)
        for config in self._sweep.configs:
            config.total_steps(len(data.train_x))
        return data

    def run(self, jobs: Sequence[_Job]) -> Iterator[PairRecord]:
        """Train the pairs that the folder does not have, at once where that helps; evaluate them, write the records."""
        pairs = [job.trained() for job in jobs]
        missing = [index for index, pair in enumerate(pairs) if pair is None]
        if len(missing) > 1 and self._stacks:
            configs = [jobs[index].config for index in missing]
            for index, pair in zip(missing, train_pairs(configs, data=self._data, progress=self._check), strict=True):
                pair.save(jobs[index].folder)
                pairs[index] = pair
        for job, found in zip(jobs, pairs, strict=True):
            pair = found or train_pair(job.config, data=self._data, progress=self._check)
            if found is None:
                pair.save(job.folder)
            with _threads(job.config.threads):
                record = self._evaluate(pair, self._data, job)
            write_json(job.folder / "record.json", record.to_dict())
            yield record

    @functools.cached_property
    def _stacks(self) -> bool:
        layers = _model(self._sweep.base, self._data).modules()
        return self._stack_convolutions or not any(isinstance(layer, nn.modules.conv._ConvNd) for layer in layers)

    def _check(self, *_: object) -> None:
        if self.stop is not None and self.stop.is_set():
            raise _StoppedError

    def _evaluate(self, pair: Pair, data: Data, job: _Job) -> PairRecord:
        start = time.perf_counter()
        status: Status = pair.status
        path = None
        others: dict[str, dict[str, Metrics]] = {}
        if pair.status == "ok" and pair.a is not None and pair.b is not None:
            model = _model(job.config, data)
            evaluators = {split: Evaluator(data.parts[split]) for split in ("val", "test") if len(data.parts[split][0])}
            bn_data = data.train_x[:BN_SAMPLES]
            path = scan_line(
                *(model, pair.a, pair.b, evaluators, job.points),
                base=pair.trunk,
                bn_data=bn_data,
                progress=self._check,
            )
            others = {split: {} for split in evaluators}
            for name in ("annealed_a", "annealed_b", "ema"):
                if name in pair.states:
                    with FlatState.from_state_dict(pair.states[name], device=data.device).bind(model):
                        norms.reset_statistics(model, bn_data)
                        for split, evaluator in evaluators.items():
                            others[split][name] = evaluator(model)
            ends = path.summary["val" if "val" in evaluators else "test"]["accuracy"].ends
            if not np.mean(ends) >= job.config.min_accuracy:
                status = "untrained"
        return PairRecord(
            scale=job.scale,
            pair=job.pair,
            seed=job.config.seed,
            status=status,
            digest=job.digest,
            path=path,
            others=others,
            seconds={"train": pair.seconds, "evaluate": time.perf_counter() - start},
        )


def _grouped(jobs: Sequence[_Job], together: int) -> list[list[_Job]]:
    """Jobs in groups of up to ``together`` that can be trained at once, in their order as far as that goes."""
    groups: list[list[_Job]] = []
    open_groups: dict[str, list[_Job]] = {}
    for job in jobs:
        shape = repr([getattr(job.config, name) for name in SHARED])
        group = open_groups.get(shape)
        if group is None or len(group) == together:
            group = open_groups[shape] = []
            groups.append(group)
        group.append(job)
    return groups


def _run_here(groups: Sequence[Sequence[_Job]], worker: _Worker) -> Iterator[PairRecord]:
    for group in groups:
        yield from worker.run(group)


def _run_in_processes(groups: Sequence[Sequence[_Job]], worker: _Worker, workers: int) -> Iterator[PairRecord]:
    """Do the jobs in processes of their own; after an interrupt or error these stop at their next step and end."""
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(worker, stop))
    try:
        with _ignored_interrupts():  # which the processes inherit: this process alone answers to Ctrl-C
            futures = [pool.submit(_run_in_worker, group) for group in groups]
        for future in as_completed(futures):
            yield from future.result()
    except BrokenProcessPool as error:
        raise IsthmusError(
            "a worker process of the sweep died, perhaps for lack of memory, or because the calling script has no "
            "'if __name__ == \"__main__\":'. Try again with workers=1; the pairs that are finished are kept."
        ) from error
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


_worker: _Worker | None = None  # of a worker process


def _start_worker(worker: _Worker, stop: Event) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = worker
    _worker.stop = stop


def _end_with_parent() -> None:
    """A parent that is killed cannot say so: its processes would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_in_worker(group: Sequence[_Job]) -> list[PairRecord]:
    if _worker is None:
        raise IsthmusError("this process is not a worker of a sweep.")
    return list(_worker.run(group))


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _claim(folder: Path, config: SweepConfig) -> None:
    """Write the configuration into the folder, or check that it is the one that is there."""
    path = folder / "sweep.json"
    wanted = config.to_dict()
    if path.is_file():
        content = read_json(path)
        there = content.get("config", {}) if isinstance(content, dict) else {}
        if differences := _differences(there, wanted):
            raise InputError(
                f"the folder {folder} holds a sweep of another configuration: {'; '.join(differences)}. "
                "Use another folder, or remove this one."
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"could not make the folder {folder}: {error.strerror}.") from error
    write_json(path, {"schema": SCHEMA, "isthmus": __version__, "config": wanted})


def _differences(there: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What differs, by dotted name; the number of pairs may."""
    found = []
    for name in sorted((there.keys() | wanted.keys()) - ({"pairs"} if not prefix else set())):
        old, new = there.get(name), wanted.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += _differences(old, new, f"{prefix}{name}.")
        elif old != new and list(_items(old)) != list(_items(new)):
            found.append(f"{prefix}{name} is {old} there and {new} now")
    return found


def _items(value: object) -> Sequence[Any]:
    """Lists and tuples alike: JSON knows lists alone."""
    return value if isinstance(value, list | tuple) else [value]


def _model(config: TrainConfig, data: Data) -> nn.Module:
    """The architecture, with weights that do not matter and do not touch the global random state."""
    with torch.random.fork_rng(devices=[]):
        return build_model(config.model, data, **config.model_options).to(data.device)


def _check_names(values: Mapping[str, Any], known: Sequence[str], title: str) -> None:
    for name in values:
        if name not in known:
            raise InputError(f"{title}: there is no {name!r}{nearest(name, known)} Known are {', '.join(known)}.")


def _changed(augmentation: Augmentation) -> dict[str, Any]:
    """The options that are not at their default."""
    return {name: value for name, value in asdict(augmentation).items() if value != getattr(Augmentation(), name)}


def _plain(value: object) -> object:
    return asdict(value) if isinstance(value, Augmentation) else value


def _machine(config: TrainConfig, workers: int) -> dict[str, Any]:
    device = torch.device(config.device)
    return {
        "isthmus": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": config.threads,
        "workers": workers,
    }


def _processor() -> str:
    """The processor's name; Linux keeps it in a file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
