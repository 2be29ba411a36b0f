"""Evaluate the points of a scan, while the device is behind.

On a GPU, Python gives the device work for some points before it reads the values of the first. There are two weight
buffers, each with a model of its own: while one point is evaluated in one of them, a second stream writes the weights
of the next into the other. What a pass over the data asks of the device is captured in a graph for each buffer
(``isthmus.path.graphs``), and some models are evaluated several at once (``isthmus.path.several``). The values of a
point are read together, when those after it are under way. The copy of the model, graphs and several at once are used
when each was compared with the model itself at the walk's landmarks.

Points at which more is done than to run evaluators, and all points on a CPU, are evaluated in full one after the other.
On a device that does everything when it is asked for, both ways give the same values to the bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from isthmus.errors import EvaluationError
from isthmus.flat import Binding

from .checkpoint import Finished
from .device import InOrder, Mark, Read, device_of
from .evaluate import Evaluator
from .graphs import Pass, agree, bounds, told, why_not_replayed
from .shared import SharedLayers
from .slots import Slot, copied

if TYPE_CHECKING:
    from .several import SeveralModels
    from .walk import Walk

Point = TypeVar("Point", bound=Hashable)

AHEAD = 2  # so many points are under way before the values of the oldest are read: one for each weight buffer
NO_GRAPHS = "graphs=False was asked for"
DEPENDENT = "each point depends on the values of those before"
FEW = "there were too few points"
ROOM = 2  # a second buffer is made where the device has room for so many more models: itself, and some to spare


@dataclass(eq=False)
class Flight(Generic[Point]):
    """Points whose values are on their way: one row each, split by split."""

    points: Sequence[Point]
    read: Read
    start: Mark
    end: Mark
    statistics: Mark | None = None  # when BatchNorm statistics were there


class Pipeline(Generic[Point]):
    """The points of one walk on their way through the device."""

    def __init__(self, walk: Walk[Point, Any], total: int | None) -> None:
        """Prepare.

        Args:
            walk: what writes and measures.
            total: the number of points; None where points depend on the values of those before.
        """
        dependent = total is None
        self._walk = walk
        self._evaluators = {split: each for split, each in walk.splits.items() if isinstance(each, Evaluator)}
        self._device = device_of(walk.work.device)
        self._ahead = AHEAD if self._device.background and not dependent else 0
        self._slots: list[Slot] = []
        self._launched = 0
        self._flights: deque[Flight[Point]] = deque()
        self._gathered: list[Point] = []  # to be evaluated together
        self._landmarks: dict[Point, list[float]] = {}  # what the model gives there, by which other ways are proven
        self._several: SeveralModels | None = None
        self._together: Pass | None = None  # by which several are evaluated, once that was compared with single ones
        self._in_full = _why_in_full(self._device)
        self._one_buffer: str | None = DEPENDENT if dependent else self._in_full
        self._one_by_one: str | None = DEPENDENT if dependent else None
        self._total = total

    @contextmanager
    def opened(self, binding: Binding) -> Iterator[None]:
        """Within the block, points can be evaluated; ``binding`` is that of the walk's model to its state."""
        walk, device = self._walk, self._device
        with device.here():
            self._slots = [Slot(walk.model, walk.work, binding, device.mark())]
            if self._total is not None:
                several = walk.several(device)
                if not isinstance(several, str) and self._total < 2 * several.number:
                    several = FEW
                self._several, self._one_by_one = (None, several) if isinstance(several, str) else (several, None)
            try:
                yield
            finally:
                with device.aside([]):
                    last = device.mark()
                device.wait(last)  # then what was used in the background may be freed
                for slot in self._slots[1:]:
                    slot.binding.undo()

    def told(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """What was used, as results keep it; the same for each split that has an ``Evaluator``."""
        number = max(1, len(self._slots))
        used = {"weight_buffers": {"number": number, "why_not_2": self._one_buffer}}
        return used, {split: self._told_of_split(split) for split in self._evaluators}

    def results(
        self, points: Iterable[Point], known: Callable[[Point], Finished | None]
    ) -> Generator[tuple[Point, Finished]]:
        """Each point with what was found, in order; of those that are known, that.

        Where evaluating a point fails, those before come first.
        """
        if not self._device.background and self._several is None:
            for point in points:
                found = known(point)
                yield point, self._walk.evaluate(point, self._slots[0].binding) if found is None else found
            return
        try:
            for point in points:
                found = known(point)
                late = found is None and self._walk.late(point)
                if late and self._several is not None and self._together is None:
                    self._prove_several(self._several)
                if late and self._several is not None:
                    self._gathered.append(point)
                    if len(self._gathered) == self._several.number:
                        self._launch_gathered()
                elif late and self._device.background:
                    self._launch(point)
                else:
                    self._launch_gathered()
                    yield from self._landed(0)
                    finished = self._evaluate(point) if found is None else found
                    yield point, finished
                yield from self._landed(self._ahead)
            self._launch_gathered()
            yield from self._landed(0)
        except GeneratorExit:
            raise
        except BaseException:
            yield from self._landed(0)
            raise

    def _evaluate(self, point: Point) -> Finished:
        """Evaluate a point in full."""
        finished = self._walk.evaluate(point, self._slots[0].binding)
        free = self._device.mark()
        for slot in self._slots:  # what the evaluation used may be written to in the background from here on
            slot.free = free
        return finished

    def _launch(self, point: Point) -> None:
        """Give the device a point to evaluate, in the buffer whose turn it is."""
        if self._launched == 0:  # before graphs, which are lost where there is no room for them
            self._make_second_slot()
        slot = self._slots[self._launched % len(self._slots)]
        if not slot.proven and not self._proves(slot):
            slot = self._slots[0]
        self._launched += 1
        self._prove_graphs(slot)
        start, statistics, means = self._means(point, slot)
        self._flights.append(Flight([point], self._device.fetch(means[None]), start, slot.free, statistics))

    def _means(self, point: Point, slot: Slot, *, replay: bool = True) -> tuple[Mark, Mark | None, Tensor]:
        """When the means of all splits were begun, when the BatchNorm statistics were there, and the means."""
        walk, device = self._walk, self._device
        self._write(point, slot)
        start = device.mark()
        statistics = device.mark() if walk.estimate(slot.model) else None
        means = []
        written = slot.writes
        for split in self._evaluators:
            if slot.writes != written:  # by the evaluator before: this one must not see it
                slot.free = device.mark()
                self._write(point, slot)
                walk.estimate(slot.model)
                written = slot.writes
            slot.model.eval()
            try:
                shared = walk.first_layers(split)
                each = self._pass(slot, split, shared)
                numbers = () if shared is None else walk.coordinates(point)
                means.append(each(numbers) if replay else each.compute(numbers))
                slot.binding.check()
            except Exception as error:
                raise walk.failed(split, point, error) from error
        together = torch.cat(means)
        slot.free = device.mark()
        return start, statistics, together

    def _write(self, point: Point, slot: Slot) -> None:
        """Write the weights of a point in the background, when those of the point before are no longer used."""
        with self._device.aside(list(slot.state.buffers.values())):
            self._device.wait(slot.free)
            self._walk.write(point, slot.state)
            written = self._device.mark()
        self._device.wait(written)

    def _pass(self, slot: Slot, split: str, shared: SharedLayers | None) -> Pass:
        """The pass of a buffer's model over the data of a split, made anew when other layers are shared."""
        known = slot.passes.get(split)
        if known is None or known[0] is not shared:
            known = slot.passes[split] = (shared, self._make_pass(slot, self._evaluators[split], shared))
        return known[1]

    def _make_pass(self, slot: Slot, evaluator: Evaluator, shared: SharedLayers | None) -> Pass:
        model = slot.model
        if shared is not None and model is not self._walk.model:
            shared = shared.on_copy(self._walk.model, model)

        def compute(coordinates: Sequence[float]) -> Tensor:
            with nullcontext() if shared is None else shared.combine(coordinates):
                return evaluator.means(model, size=True)

        def capturable(coordinates: Tensor) -> Tensor:
            with nullcontext() if shared is None else shared.combine(coordinates):
                return evaluator.bare_means(model)[0]

        return Pass(
            self._device,
            compute,
            capturable,
            models=[model],
            read=[evaluator.inputs, evaluator.targets],
            bounds=bounds(evaluator, model),
            times=self._times(shared),
            why_not=why_not_replayed(model) if evaluator.graphs else NO_GRAPHS,
        )

    def _times(self, shared: SharedLayers | None) -> float:
        """At how many points a pass is done in one buffer, as far as is known."""
        if self._total is None:
            return math.inf
        return (self._total if shared is None else self._walk.same_layers(self._total)) // len(self._slots)

    def _make_second_slot(self) -> None:
        """A second weight buffer, unless there is a reason not to have one."""
        if self._total is None:
            return
        needed = ROOM * sum(buffer.nbytes for buffer in self._walk.work.buffers.values())
        free = self._device.free_bytes()
        self._one_buffer = why_not_replayed(self._walk.model)
        if self._one_buffer is None and free < needed:
            self._one_buffer = f"the device has room for {free / 2**20:.0f} MiB, expected {needed / 2**20:.0f}"
        if self._one_buffer is None:
            try:
                self._slots.append(copied(self._slots[0]))
            except Exception as error:
                self._one_buffer = f"the model cannot be copied: {told(error)}"

    def _proves(self, slot: Slot) -> bool:
        """Whether the copy of the model in a buffer gives at the landmarks what the model does; if not, it goes.

        Meanwhile the model has the weights of another point: a copy that still computes with some of them is found.
        """
        allowed = [bound for each in self._evaluators.values() for bound in bounds(each, slot.model)]
        for landmark in self._walk.landmarks:
            try:
                found = self._means(landmark, slot, replay=False)[-1].tolist()
            except Exception as error:
                self._one_buffer = f"the copy of the model fails: {told(error)}"
                break
            if not agree(found, self._expected(landmark), allowed):
                self._one_buffer = "a copy of the model gives other values, by more than rounding"
                break
        slot.proven = self._one_buffer is None
        if not slot.proven:
            self._slots.remove(slot)
            slot.binding.undo()
        return slot.proven

    def _prove_graphs(self, slot: Slot) -> None:
        """See whether what was captured in a buffer gives at the landmarks what the model does."""
        walk = self._walk
        layers = {split: walk.first_layers(split) for split in self._evaluators}
        passes = {split: self._pass(slot, split, shared) for split, shared in layers.items()}
        doubtful = {split: each for split, each in passes.items() if each.doubtful}
        for landmark in walk.landmarks if doubtful else ():
            expected = self._by_split(self._expected(landmark))
            self._write(landmark, slot)
            walk.estimate(slot.model)
            slot.model.eval()
            for split, each in doubtful.items():
                each.compare(() if layers[split] is None else walk.coordinates(landmark), expected[split])
            slot.free = self._device.mark()

    def _expected(self, landmark: Point) -> list[float]:
        """What the model itself gives at a landmark."""
        if landmark not in self._landmarks:
            self._landmarks[landmark] = self._means(landmark, self._slots[0], replay=False)[-1].tolist()
        return self._landmarks[landmark]

    def _prove_several(self, several: SeveralModels) -> None:
        """See whether several models at once give at the landmarks what single ones do."""
        landmarks = self._walk.landmarks
        rows = several.filled([self._expected(landmark) for landmark in landmarks])
        self._one_by_one = several.why_not(several.filled(self._places(landmarks)), rows)
        if self._one_by_one is not None or self._total is None:
            self._several = None
            return
        evaluators = several.evaluators.values()
        self._together = Pass(
            self._device,
            several.compute,
            several.means,
            models=[several.model],
            read=[part for each in evaluators for part in (each.inputs, each.targets)],
            bounds=several.bounds,
            times=self._total // several.number,
            why_not=None if all(each.graphs for each in evaluators) else NO_GRAPHS,
        )

    def _prove_graph_of(self, several: SeveralModels, together: Pass) -> None:
        """See whether what was captured of several models at once gives at the landmarks what single ones do."""
        if together.doubtful:
            landmarks = self._walk.landmarks
            rows = several.filled([self._expected(landmark) for landmark in landmarks])
            together.compare(several.filled(self._places(landmarks)), [value for row in rows for value in row])

    def _launch_gathered(self) -> None:
        """Give the device the points that are to be evaluated together."""
        if not self._gathered or self._several is None or self._together is None:
            return
        points, self._gathered = self._gathered, []
        start = self._device.mark()
        try:
            self._prove_graph_of(self._several, self._together)
            means = self._together(self._several.filled(self._places(points)))
        except Exception as error:
            names = f"{self._walk.name(points[0])} and {len(points) - 1} more"
            raise EvaluationError(
                f"evaluating {names} at once failed ({told(error)}); the attribute partial of this error has the "
                "points before. Give the Evaluator alphas_at_once=1."
            ) from error
        self._flights.append(Flight(points, self._device.fetch(means), start, self._device.mark()))

    def _places(self, points: Sequence[Point]) -> list[float]:
        """Where points lie on a line."""
        return [self._walk.coordinates(point)[0] for point in points]

    def _landed(self, under_way: int) -> Iterator[tuple[Point, Finished]]:
        """What was found at the oldest points, until only so many launches are under way."""
        while len(self._flights) > under_way:
            flight = self._flights[0]
            try:
                rows = flight.read()
                seconds = self._device.seconds(flight.start, flight.end) / len(flight.points)
                statistics = flight.statistics
                bn_seconds = None if statistics is None else self._device.seconds(flight.start, statistics)
            except Exception as error:  # an interrupt leaves the flight where it is, to be read after all
                self._flights.clear()
                raise EvaluationError(
                    f"the device failed at {self._walk.name(flight.points[0])} or shortly after ({told(error)}); "
                    "the attribute partial of this error has the points before."
                ) from error
            self._flights.popleft()
            for point, row in zip(flight.points, rows, strict=False):  # a last group has been filled up
                values = {split: self._evaluators[split].named(own[:-1]) for split, own in self._by_split(row).items()}
                yield point, Finished(values, seconds, bn_seconds)

    def _told_of_split(self, split: str) -> dict[str, Any]:
        passes = [slot.passes[split][1] for slot in self._slots if split in slot.passes]
        at_once = {"number": 1, "why_not": self._one_by_one or FEW}
        if self._several is not None and self._together is not None:
            passes = [self._together]
            at_once = {"number": self._several.number, "why_not": None}
        reasons = [each.why_not for each in passes if not each.replayed]
        graph = {
            "captured": any(each.replayed for each in passes),
            "why_not": (reasons[0] or FEW) if reasons else None if passes else self._in_full,
        }
        return {"graph": graph, "alphas_at_once": at_once}

    def _by_split(self, row: Sequence[float]) -> dict[str, Sequence[float]]:
        """Split -> means of its metrics, and the mean size of outputs."""
        parts, start = {}, 0
        for split, evaluator in self._evaluators.items():
            end = start + len(evaluator.metrics) + 1
            parts[split], start = row[start:end], end
        return parts


def _why_in_full(device: InOrder) -> str:
    """Why points are evaluated in full, one after the other, where all are."""
    if device.background:
        return "there was no point at which no more is done than to run evaluators"
    return f"the device {str(device.device)!r} does nothing in the background"
