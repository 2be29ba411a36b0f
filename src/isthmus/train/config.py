"""The configuration of one training run: everything that decides the weights of a pair."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from isthmus.errors import InputError

from .augment import Augmentation
from .factory import nearest
from .noise import NoiseScale, Rule

Precision = Literal["float32", "bfloat16"]

_CHOICES = {
    "optimizer": ("sgd", "adamw"),
    "schedule": ("constant", "cosine", "wsd"),
    "kind": ("trunk", "independent"),
    "noise_rule": (None, "sgd", "adam"),
    "precision": ("float32", "bfloat16"),
}
_LATER: dict[str, object] = {"precision": "float32"}
_COUNTS = {"batch_size": 1, "warmup_steps": 0, "branch_step": 0, "anneal_steps": 0, "record_every": 1}
_OPTIONAL_COUNTS = {"steps": 1, "epochs": 1, "threads": 1}
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda value: value > 0, "a positive number"),
    "momentum": (lambda value: 0 <= value < 1, "a number from 0 up to, not including, 1"),
    "weight_decay": (lambda value: value >= 0, "a number of at least 0"),
    "decay_fraction": (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "min_accuracy": (lambda value: 0 <= value <= 1, "a fraction from 0 to 1"),
    "noise_exponent": (lambda value: True, "a finite number"),
}


@dataclass(frozen=True)
class TrainConfig:
    """How one pair of models is trained.

    The learning rate rises linearly over ``warmup_steps`` to ``lr``; then it stays (``constant``), falls along half a
    cosine to zero at the last step (``cosine``), or stays and falls linearly to zero over the last ``decay_fraction``
    of the steps (``wsd``, warm-up-stable-decay). Weight decay is torch's: added to the gradient for ``sgd``, decoupled
    for ``adamw``.

    Args:
        data: name of a data set, or ``package.module:factory``; see ``load_data``.
        data_options: its options.
        model: name of a model, or ``package.module:factory``; see ``build_model``.
        model_options: its options.
        optimizer: ``sgd`` or ``adamw``.
        lr: peak learning rate.
        batch_size: examples per step; every step of an epoch has as many, and the remainder of the epoch is left out.
        momentum: momentum of SGD.
        nesterov: Nesterov's form of momentum.
        weight_decay: weight decay of all parameters.
        betas: decay rates of AdamW's two moments.
        noise_rule: formula of the noise scale, ``sgd`` or ``adam``; see ``NoiseScale``. None takes ``sgd`` with SGD and
            leaves the noise scale undefined with AdamW, whose first beta is the momentum where ``sgd`` is named.
        noise_exponent: power of 1 − momentum in the noise scale of SGD.
        schedule: ``constant``, ``cosine`` or ``wsd``.
        warmup_steps: steps of linear warm-up.
        decay_fraction: part of all steps over which ``wsd`` decays.
        steps: length of training in steps, from the start of the trunk to the end of a branch. Exactly one of steps and
            epochs is given.
        epochs: the same length in epochs of ``train size // batch_size`` steps.
        kind: ``trunk``: two branches go on from one trunk. ``independent``: two models from different initial weights.
        branch_step: step at which the branches leave the trunk; 0 shares the initial weights alone. Independent models
            have no trunk and leave this 0.
        anneal_steps: further steps of each end with a rate that falls linearly from ``lr`` to zero; 0 leaves annealing
            out. Only with the ``constant`` schedule: the others have annealed already.
        ema_decay: decay of the exponential moving average of branch a's weights, averaged after every step since the
            branch; None leaves it out.
        augmentation: an ``Augmentation``, or a mapping of its fields.
        min_accuracy: accuracy under which an end counts as untrained.
        seed: seed of initial weights, data order and augmentation. Pairs with one seed share these across all other
            settings.
        device: where to train, such as ``cpu`` or ``cuda``.
        threads: CPU threads of torch while training; None leaves them as they are.
        record_every: steps between two entries of the history.
        precision: ``bfloat16`` runs the model's forward passes under torch's autocast, whose matrix products and
            convolutions take and give bfloat16. Weights, gradients, optimiser state and the loss stay as they are.

    Raises:
        InputError: a value is out of range, or two do not go together; the message names them.
    """

    data: str = "digits"
    data_options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "mlp"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    batch_size: int = 16
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    noise_rule: Rule | None = None
    noise_exponent: float = 1.0
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    warmup_steps: int = 0
    decay_fraction: float = 0.2
    steps: int | None = None
    epochs: int | None = None
    kind: Literal["trunk", "independent"] = "trunk"
    branch_step: int = 0
    anneal_steps: int = 0
    ema_decay: float | None = None
    augmentation: Augmentation = field(default_factory=Augmentation)
    min_accuracy: float = 0.5
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    record_every: int = 10
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if isinstance(self.augmentation, Mapping):
            _check_names(self.augmentation, Augmentation, "augmentation")
            object.__setattr__(self, "augmentation", Augmentation(**self.augmentation))
        object.__setattr__(self, "betas", tuple(self.betas))
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise InputError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}.")
        for name, least in (_COUNTS | _OPTIONAL_COUNTS).items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_COUNTS:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} is {value!r}, expected an integer of at least {least}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InputError(f"seed is {self.seed!r}, expected an integer.")
        for name, (within, expected) in _NUMBERS.items():
            value = getattr(self, name)
            if not (_is_number(value) and within(value)):
                raise InputError(f"{name} is {value!r}, expected {expected}.")
        if self.ema_decay is not None and not (_is_number(self.ema_decay) and 0 < self.ema_decay < 1):
            raise InputError(f"ema_decay is {self.ema_decay!r}, expected a number between 0 and 1, or none.")
        if len(self.betas) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas is {self.betas}, expected two numbers from 0 up to, not including, 1.")

    def _check_combinations(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise InputError(f"steps is {self.steps} and epochs is {self.epochs}: give exactly one of the two.")
        if self.steps is not None:
            self._check_length(self.steps)
        if self.kind == "independent" and self.branch_step:
            raise InputError(f"branch_step is {self.branch_step}, but independent models have no trunk: leave it 0.")
        if self.anneal_steps and self.schedule != "constant":
            raise InputError(
                f"anneal_steps is {self.anneal_steps}, but the schedule {self.schedule!r} has annealed the ends "
                "already: leave it 0, or use the constant schedule."
            )
        if self.nesterov and self.momentum == 0:
            raise InputError("nesterov needs a momentum above 0.")
        if self.optimizer == "sgd" and self.noise_rule == "adam":
            raise InputError("noise_rule 'adam' does not describe the optimizer 'sgd': leave it out, or use 'sgd'.")

    def _check_length(self, steps: int) -> None:
        for name in ("warmup_steps", "branch_step"):
            if (value := getattr(self, name)) >= steps:
                raise InputError(f"{name} is {value}, expected less than the {steps} steps of training.")

    @property
    def noise_scale(self) -> NoiseScale:
        """The noise scale of the peak learning rate.

        Raises:
            InputError: the optimiser is AdamW and no ``noise_rule`` is named: the formula of SGD does not hold for it.
        """
        rule = self.noise_rule or ("sgd" if self.optimizer == "sgd" else None)
        if rule is None:
            raise InputError(
                "the noise scale lr / (batch_size · (1 − momentum)) does not hold for the optimizer 'adamw': name the "
                "rule, such as noise_rule='adam' (lr / √batch_size)."
            )
        if rule == "adam":
            return NoiseScale(self.lr, self.batch_size, rule="adam")
        momentum = self.momentum if self.optimizer == "sgd" else self.betas[0]
        return NoiseScale(self.lr, self.batch_size, momentum, self.noise_exponent)

    def total_steps(self, train_size: int) -> int:
        """Steps of training, from the start of the trunk to the end of a branch, on ``train_size`` examples.

        Raises:
            InputError: a batch is larger than the training data, or warm-up or branch step are not within the steps.
        """
        if self.batch_size > train_size:
            raise InputError(
                f"batch_size is {self.batch_size}, larger than the {train_size} training examples: take fewer."
            )
        if self.steps is not None:
            return self.steps
        steps = (self.epochs or 0) * (train_size // self.batch_size)
        self._check_length(steps)
        return steps

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain values, for JSON.

        Options that came later are left out at their defaults, so that the digests of older files stay valid.
        """
        values = asdict(self) | {"betas": list(self.betas)}
        return {name: value for name, value in values.items() if name not in _LATER or value != _LATER[name]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The configuration from plain values; what is left out has its default.

        Raises:
            InputError: a name is unknown, or a value is out of range.
        """
        _check_names(values, cls, "configuration")
        return cls(**values)

    @property
    def digest(self) -> str:
        """SHA-256 of the configuration as JSON with sorted keys: equal for equal configurations."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def _check_names(values: Mapping[str, Any], kind: type, title: str) -> None:
    known = [entry.name for entry in fields(kind)]
    for name in values:
        if name not in known:
            raise InputError(f"{title}: there is no {name!r}{nearest(name, known)} Known are {', '.join(known)}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
