"""Train a pair of models that share a trunk, or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from isthmus.errors import FileError
from isthmus.io import load_state, read_json, save_state, write_json

from .config import TrainConfig
from .data import Data, load_data
from .loop import MovingAverage, Phase, Trainer
from .models import build_model
from .schedules import annealing, schedule
from .seeds import global_seed

State = dict[str, Tensor]
Progress = Callable[[int, int], None]

SCHEMA = 1
RECORD = "pair.json"
STATES = ("trunk", "a", "b", "annealed_a", "annealed_b", "ema")


@dataclass(frozen=True, eq=False)
class Pair:
    """Two trained models, what they share, and how they came about.

    State dicts are on the CPU. One is None where the configuration does not ask for it, or where training diverged
    before its end.

    Attributes:
        config: the configuration.
        status: ``ok``, or ``diverged`` if a loss or weight stopped being finite; training stopped there.
        trunk: the state that the branches left, the base of their task vectors; None for independent pairs.
        a, b: the two ends.
        annealed_a, annealed_b: the ends after annealing.
        ema: exponential moving average of branch a.
        history: phase -> column -> values; see ``loop.Phase``. Phases are ``trunk``, ``a``, ``b``, ``annealed_a`` and
            ``annealed_b``, as far as they came.
        steps: phase -> steps done.
        seconds: wall-clock time of training.
    """

    config: TrainConfig
    status: Literal["ok", "diverged"]
    trunk: State | None = None
    a: State | None = None
    b: State | None = None
    annealed_a: State | None = None
    annealed_b: State | None = None
    ema: State | None = None
    history: Mapping[str, Mapping[str, list[float]]] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def states(self) -> dict[str, State]:
        """The state dicts that there are, by name."""
        states = {name: getattr(self, name) for name in STATES}
        return {name: state for name, state in states.items() if state is not None}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``<name>.safetensors`` for every state, then ``pair.json``: a folder with that file is a finished pair.

        Args:
            folder: made if need be; a pair already in it is replaced.

        Raises:
            FileError: a file could not be written.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RECORD).unlink(missing_ok=True)
        except OSError as error:
            raise FileError(f"could not write to the folder {folder}: {error}.") from error
        for name, state in self.states.items():
            save_state(folder / f"{name}.safetensors", state, {"config": self.config.digest})
        write_json(
            folder / RECORD,
            {
                "schema": SCHEMA,
                "digest": self.config.digest,
                "status": self.status,
                "config": self.config.to_dict(),
                "states": list(self.states),
                "steps": self.steps,
                "seconds": self.seconds,
                "history": self.history,
            },
        )

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Pair:
        """Read a pair that ``save`` wrote.

        Raises:
            FileError: the folder does not hold a finished pair, or a file is unreadable or of another schema.
        """
        folder = Path(folder)
        if not (folder / RECORD).is_file():
            raise FileError(f"{folder} does not hold a finished pair: there is no {RECORD} in it. Check the path.")
        record = cast(dict[str, Any], read_json(folder / RECORD))
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            raise FileError(f"{folder / RECORD} is not a pair's record of schema {SCHEMA}. Train the pair again.")
        states: dict[str, State] = {name: load_state(folder / f"{name}.safetensors") for name in record["states"]}
        return cls(
            config=TrainConfig.from_dict(record["config"]),
            status=record["status"],
            steps=record["steps"],
            seconds=record["seconds"],
            history={
                phase: {column: [float(value) for value in values] for column, values in columns.items()}
                for phase, columns in record["history"].items()
            },
            **states,
        )


def train_pair(
    config: TrainConfig,
    *,
    model: Callable[[Data], nn.Module] | None = None,
    data: Data | None = None,
    progress: Progress | None = None,
) -> Pair:
    """Train a pair of models.

    ``kind="trunk"``: one model is trained to ``branch_step``; two branches go on from its weights and optimiser state
    with data order, augmentation and dropout of their own. ``kind="independent"``: two models are trained from
    different initial weights. Then each end is annealed, if asked for.

    The same configuration gives the same weights to the bit on the same machine with the same number of threads. Global
    random state, thread count and cuDNN's settings are left as they were.

    Args:
        config: what to train and how.
        model: a factory to use instead of the configuration's model; called as ``model(data)``. Its initial weights
            come from torch's global random state, which is seeded before.
        data: a data set to use instead of the configuration's.
        progress: called as ``progress(steps_done, steps_in_all)`` now and then.

    Returns:
        The pair. One whose loss stops being finite comes back with status ``diverged``, without the states after that.

    Raises:
        InputError: the configuration does not fit the data or the model.
        FileError: the data are missing or unreadable.
        DependencyError: a package that the data need is not installed.
    """
    if data is None:
        data = load_data(config.data, **config.data_options)
    data = data.to(config.device)
    with _environment(config):
        run = _PairRun(config, model, data, progress)
        try:
            run.train()
        except _DivergedError:
            return run.pair("diverged")
        return run.pair("ok")


class _DivergedError(Exception):
    """Training stopped because a loss or weight is not finite."""


class _PairRun:
    """The training of one pair, phase after phase."""

    def __init__(
        self,
        config: TrainConfig,
        model: Callable[[Data], nn.Module] | None,
        data: Data,
        progress: Progress | None,
    ) -> None:
        self._config = config
        self._data = data
        self._model = model or (lambda data: build_model(config.model, data, **config.model_options))
        self._progress = progress
        self._length = config.total_steps(len(data.train_x))
        self._total = 2 * (self._length + config.anneal_steps) - config.branch_step
        self._done = 0
        self._states: dict[str, State] = {}
        self._phases: dict[str, Phase] = {}

    def train(self) -> None:
        rates = schedule(self._config, self._length)
        branch = self._config.branch_step
        if self._config.kind == "trunk":
            trunk = self._trainer("trunk")
            self._run(trunk, "trunk", rates, range(branch))
            start = trunk.checkpoint()
        for end in ("a", "b"):
            if self._config.kind == "trunk":
                trainer = trunk
                trainer.restore(start)
            else:
                trainer = self._trainer(end)
            average = None
            if end == "a" and self._config.ema_decay is not None:
                average = MovingAverage(trainer.model, self._config.ema_decay)
            self._run(trainer, end, rates, range(branch, self._length), average)
            if average is not None:
                self._states["ema"] = _on_cpu(average.state_dict())
            if self._config.anneal_steps:
                self._run(trainer, f"annealed_{end}", annealing(self._config), range(self._config.anneal_steps))

    def pair(self, status: Literal["ok", "diverged"]) -> Pair:
        return Pair(
            config=self._config,
            status=status,
            history={name: phase.history for name, phase in self._phases.items()},
            steps={name: phase.steps for name, phase in self._phases.items()},
            seconds=sum(phase.seconds for phase in self._phases.values()),
            **self._states,
        )

    def _trainer(self, purpose: str) -> Trainer:
        """A trainer of a model with fresh weights, drawn on the CPU so that they are the same on every device."""
        with global_seed(self._config.seed, f"weights/{purpose}", torch.device("cpu")):
            model = self._model(self._data)
        return Trainer(model.to(self._data.device), self._data, self._config)

    def _run(
        self,
        trainer: Trainer,
        name: str,
        rates: Callable[[int], float],
        steps: range,
        average: MovingAverage | None = None,
    ) -> None:
        phase = self._phases[name] = trainer.run(name, rates, steps, average=average, progress=self._advance)
        if not phase.finite:
            raise _DivergedError
        self._states[name] = _on_cpu(trainer.model.state_dict())

    def _advance(self, steps: int) -> None:
        self._done += steps
        if self._progress is not None:
            self._progress(self._done, self._total)


def _on_cpu(state: Mapping[str, Tensor]) -> State:
    """A copy of a state dict on the CPU."""
    return {key: value.detach().to("cpu", copy=True) for key, value in state.items()}


@contextmanager
def _environment(config: TrainConfig) -> Iterator[None]:
    """The number of threads asked for, and convolutions that give the same bits each time; undone afterwards."""
    cudnn = torch.backends.cudnn
    threads, before = torch.get_num_threads(), (cudnn.deterministic, cudnn.benchmark)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        cudnn.deterministic, cudnn.benchmark = before
