"""Train pairs of models that share a trunk, or nothing: one pair, or several of one shape at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from isthmus.errors import FileError, InputError
from isthmus.io import load_state, read_json, save_state, write_json

from .config import TrainConfig
from .data import Data, load_data
from .loop import Phase, Trainer
from .models import build_model
from .networks import StackError
from .parameters import MovingAverage
from .schedules import Schedule, annealing, schedule
from .seeds import global_seed

State = dict[str, Tensor]
Progress = Callable[[int, int], None]

SCHEMA = 1
RECORD = "pair.json"
STATES = ("trunk", "a", "b", "annealed_a", "annealed_b", "ema")

# what pairs that are trained at once have in common: what a step computes, and the lengths of the phases
SHARED = (
    *("data", "data_options", "model", "model_options", "precision", "optimizer", "batch_size", "steps", "epochs"),
    *("kind", "branch_step", "anneal_steps", "record_every", "device", "threads"),
)


@dataclass(frozen=True)
class Execution:
    """How the steps of a pair were computed, which changes its weights by rounding alone.

    Attributes:
        together: pairs trained at once, this one included.
        apart_reason: why the pair was trained apart from those it was to be trained with; empty if it was not.
        captured: whether the steps were replayed from a recording (a CUDA graph).
        eager_reason: if not, why.
        channels_last: whether images and convolution kernels were laid out with the channels last.
    """

    together: int = 1
    apart_reason: str = ""
    captured: bool = False
    eager_reason: str = ""
    channels_last: bool = False


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
        seconds: wall-clock time of training; of pairs trained at once, that of all.
        execution: how the steps were computed; of an older file, None.
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
    execution: Execution | None = None

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
                "execution": None if self.execution is None else asdict(self.execution),
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
        execution = record.get("execution")
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
            execution=None if execution is None else Execution(**execution),
            **states,
        )


def train_pair(
    config: TrainConfig,
    *,
    model: Callable[[Data], nn.Module] | None = None,
    data: Data | None = None,
    progress: Progress | None = None,
    capture: bool = True,
) -> Pair:
    """Train a pair of models.

    ``kind="trunk"``: one model is trained to ``branch_step``; two branches go on from its weights and optimiser state
    with data order, augmentation and dropout of their own. ``kind="independent"``: two models are trained from
    different initial weights. Then each end is annealed, if asked for.

    The same configuration gives the same weights to the bit on the same machine with the same number of threads. Global
    random state, thread count and cuDNN's settings are left as they were.

    On a CUDA device the step is recorded in a CUDA graph and replayed, where the model allows; the pair's ``execution``
    says whether it was, or why not. Images and kernels of convolutional models are laid out with the channels last.

    Args:
        config: what to train and how.
        model: a factory to use instead of the configuration's model; called as ``model(data)``. Its initial weights
            come from torch's global random state, which is seeded before.
        data: a data set to use instead of the configuration's.
        progress: called as ``progress(steps_done, steps_in_all)`` now and then.
        capture: False launches the operations of every step one by one on CUDA devices too.

    Returns:
        The pair. One whose loss stops being finite comes back with status ``diverged``, without the states after that.

    Raises:
        InputError: the configuration does not fit the data or the model.
        FileError: the data are missing or unreadable.
        DependencyError: a package that the data need is not installed.
    """
    data = _loaded(config, data)
    with _environment(config):
        return _Run([config], model, data, progress, capture).train()[0]


def train_pairs(
    configs: Sequence[TrainConfig],
    *,
    model: Callable[[Data], nn.Module] | None = None,
    data: Data | None = None,
    progress: Progress | None = None,
    capture: bool = True,
) -> list[Pair]:
    """Train several pairs of one shape at once.

    Their models are stacked, and every step steps all of them, each with its own learning rate, data order and
    augmentation: those it would have alone. The weights are those of ``train_pair`` up to rounding. Pairs that diverge
    leave the others as they are.

    Models whose ``forward`` draws random numbers (dropout), looks at values, or cannot be mapped by ``torch.vmap``, and
    models that compute something else when they are stacked, are trained one after the other; ``execution`` says why.

    Args:
        configs: of pairs that may differ in seed, learning rate and its schedule, momentum, weight decay, augmentation,
            moving average, and what describes a pair alone; nothing else.
        model: see ``train_pair``.
        data: see ``train_pair``.
        progress: called as ``progress(steps_done, steps_in_all)`` now and then; a step of all pairs is one step.
        capture: see ``train_pair``.

    Returns:
        The pairs, in the order of ``configs``.

    Raises:
        InputError: there is no configuration, or two differ in what pairs trained at once share; else as
            ``train_pair``.
        FileError, DependencyError: see ``train_pair``.
    """
    if not configs:
        raise InputError("configs is empty, expected the configuration of at least one pair.")
    for name in SHARED:
        first, *others = (getattr(config, name) for config in configs)
        if other := next((value for value in others if value != first), None):
            raise InputError(
                f"pairs that are trained at once share {name}, which is {first!r} of one and {other!r} of another: "
                "train them apart."
            )
    data = _loaded(configs[0], data)
    with _environment(configs[0]):
        try:
            return _Run(configs, model, data, progress, capture).train()
        except StackError as error:
            reason = str(error)
        pairs = []
        for index, config in enumerate(configs):
            part = _part(progress, index, len(configs))
            pairs += _Run([config], model, data, part, capture, apart_reason=reason).train()
        return pairs


def _loaded(config: TrainConfig, data: Data | None) -> Data:
    if data is None:
        data = load_data(config.data, **config.data_options)
    return data.to(config.device)


def _part(progress: Progress | None, index: int, parts: int) -> Progress | None:
    """The progress of one of several runs of one length, as that of all."""
    if progress is None:
        return None
    return lambda done, total: progress(index * total + done, parts * total)


class _AllDivergedError(Exception):
    """Training stopped because no pair has finite losses and weights."""


class _Member:
    """What has come of one of the pairs."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.diverged = False
        self.states: dict[str, State] = {}
        self.phases: dict[str, Phase] = {}


class _Run:
    """The training of one pair or several, phase after phase."""

    def __init__(
        self,
        configs: Sequence[TrainConfig],
        model: Callable[[Data], nn.Module] | None,
        data: Data,
        progress: Progress | None,
        capture: bool,
        apart_reason: str = "",
    ) -> None:
        self._members = [_Member(config) for config in configs]
        self._shared = shared = configs[0]
        self._data = data
        self._model = model or (lambda data: build_model(shared.model, data, **shared.model_options))
        self._progress = progress
        self._capture = capture
        self._length, *_ = (config.total_steps(len(data.train_x)) for config in configs)
        self._total = 2 * (self._length + shared.anneal_steps) - shared.branch_step
        self._done = 0
        self._execution = Execution(len(configs), apart_reason)

    def train(self) -> list[Pair]:
        """Train all pairs.

        Raises:
            StackError: their models cannot be trained at once.
        """
        with suppress(_AllDivergedError):
            self._train()
        return [
            Pair(
                config=member.config,
                status="diverged" if member.diverged else "ok",
                history={name: phase.history for name, phase in member.phases.items()},
                steps={name: phase.steps for name, phase in member.phases.items()},
                seconds=sum(phase.seconds for phase in member.phases.values()),
                execution=self._execution,
                **member.states,
            )
            for member in self._members
        ]

    def _train(self) -> None:
        rates = [schedule(member.config, self._length) for member in self._members]
        branch = self._shared.branch_step
        if self._shared.kind == "trunk":
            trunk = self._trainer("trunk")
            self._run(trunk, "trunk", rates, range(branch))
            start = trunk.checkpoint()
        for end in ("a", "b"):
            if self._shared.kind == "trunk":
                trainer = trunk
                trainer.restore(start)
            else:
                trainer = self._trainer(end)
            averages = {}
            if end == "a":
                averages = {
                    member: MovingAverage(model, member.config.ema_decay)
                    for member, model in zip(self._members, trainer.models, strict=True)
                    if member.config.ema_decay is not None
                }
            self._run(trainer, end, rates, range(branch, self._length), list(averages.values()))
            for member, average in averages.items():
                if not member.diverged:
                    member.states["ema"] = _on_cpu(average.state_dict())
            if self._shared.anneal_steps:
                rates_to_zero = [annealing(member.config) for member in self._members]
                self._run(trainer, f"annealed_{end}", rates_to_zero, range(self._shared.anneal_steps))

    def _trainer(self, purpose: str) -> Trainer:
        """A trainer of models with fresh weights, drawn on the CPU so that they are the same on every device."""
        models = []
        for member in self._members:
            with global_seed(member.config.seed, f"weights/{purpose}", torch.device("cpu")):
                models.append(self._model(self._data).to(self._data.device))
        return Trainer(models, self._data, [member.config for member in self._members], capture=self._capture)

    def _run(
        self,
        trainer: Trainer,
        name: str,
        rates: Sequence[Schedule],
        steps: range,
        averages: Sequence[MovingAverage] = (),
    ) -> None:
        phases = trainer.run(name, rates, steps, averages=averages, progress=self._advance)
        reason = self._execution.eager_reason or trainer.eager_reason
        self._execution = replace(
            self._execution,
            captured=reason == "",
            eager_reason=reason or "",
            channels_last=trainer.channels_last,
        )
        for member, phase, model in zip(self._members, phases, trainer.models, strict=True):
            if member.diverged:
                continue
            member.phases[name] = phase
            member.diverged = not phase.finite
            if phase.finite:
                member.states[name] = _on_cpu(model.state_dict())
        if all(member.diverged for member in self._members):
            raise _AllDivergedError

    def _advance(self, steps: int) -> None:
        self._done += steps
        if self._progress is not None:
            self._progress(self._done, self._total)


def _on_cpu(state: Mapping[str, Tensor]) -> State:
    """A copy of a state dict on the CPU, in C-order."""
    return {
        key: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for key, value in state.items()
    }


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
