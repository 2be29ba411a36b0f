"""Models on a line that are evaluated several at once."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from seeded import three
from torch import nn

from isthmus import ops
from isthmus.errors import EvaluationError, InputError
from isthmus.flat import FlatState
from isthmus.path import Curve, Evaluator, random_line, scan_curve, scan_line, several
from isthmus.path.device import InOrder
from isthmus.reference import lerp

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
AT_ONCE = 4


class Residual(nn.Module):
    """A perceptron with a sum of hidden layers, which also looks at its input a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(6, 8), nn.Linear(6, 8, bias=False)
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(hidden + self.middle(hidden).relu() + self.again(x))


class Tied(nn.Module):
    """An autoencoder of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(torch.tanh(self.encode(x / 2)))[:, :3]


class Tokens(nn.Module):
    """Linear layers on several vectors for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 5), nn.Linear(15, 3)

    def forward(self, x):
        return self.last(nn.functional.gelu(self.first(x.unflatten(1, (3, 2)))).flatten(1))


class Mixing(nn.Module):
    """A net whose examples see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(torch.tanh(hidden - hidden.mean(0)))


class Skipping(nn.Module):
    """A net that adds its input to what a layer makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(x + self.first(x))


class Aside(nn.Module):
    """A net that computes with the weights of a layer, and does not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return nn.functional.linear(torch.tanh(self.first(x)), self.last.weight, self.last.bias)


class Buffered(nn.Linear):
    """A layer of a class of its own, with a buffer."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("scale", torch.ones(()))


MODELS = {
    "perceptron": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
    "in place": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
    "one layer": lambda: nn.Linear(6, 3, bias=False),
    "residual": Residual,
    "tied": Tied,
    "tokens": Tokens,
    "double": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double(),
}
REFUSED = {
    "convolution": (lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 6), nn.Flatten()), "not all param"),
    "buffer": (Buffered, "the model has buffers"),
    "subclass": (lambda: type("Sub", (nn.Linear,), {})(6, 3), "not all parameters belong to linear layers"),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), "not all parameters"),
    "two dtypes": (lambda: nn.Sequential(nn.Linear(6, 3), Half()), "the parameters are of several dtypes"),
    "compiled": (lambda: torch.compile(nn.Sequential(nn.Linear(6, 3)), backend="eager"), "the model is compiled"),
    "mixing": (Mixing, "evaluated at once, the models give other values than one by one, by more than rounding"),
    "skipping": (Skipping, "evaluated at once, the models fail: RuntimeError: The size of tensor"),
}


class Half(nn.Module):
    """A layer in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).bfloat16()

    def forward(self, x):
        return self.linear(x.bfloat16()).float()


def examples(device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(50, 6, generator=generator), torch.randint(3, (50,), generator=generator)
    return inputs.to(device), targets.to(device)


def evaluator(models, device: torch.device, seed: int = 0, **options) -> Evaluator:
    options = {"batch_size": 16, "alphas_at_once": AT_ONCE, "share_first_layer": False} | options
    inputs, targets = examples(device, seed)
    return Evaluator((inputs.to(next(models[0].parameters()).dtype), targets), **options)


def at_once(result, split: str = "data") -> dict:
    return result.choices["splits"][split]["alphas_at_once"]


def singly(models, device, points, **options):
    return scan_line(*models, evaluator(models, device, alphas_at_once=1, graphs=False, **options), points)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the inputs that ``ops.multi_linear`` has been called with."""
    shapes, multi_linear = [], ops.multi_linear

    def counting(x, weight_a, weight_b, alphas, **biases):
        shapes.append(tuple(x.shape))
        return multi_linear(x, weight_a, weight_b, alphas, **biases)

    monkeypatch.setattr(ops, "multi_linear", counting)
    return shapes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("points", [21, 30])
def test_several_at_once_give_what_single_models_do(name, points, device, calls):
    models = three(MODELS[name], device)
    before = [copy.deepcopy(model.state_dict()) for model in models]
    found = scan_line(*models, evaluator(models, device), points)
    expected = singly(models, device, points)
    assert at_once(found) == {"number": AT_ONCE, "why_not": None}
    assert at_once(expected) == {"number": 1, "why_not": "alphas_at_once=1 was asked for"}
    assert found.alphas.tolist() == expected.alphas.tolist()
    for metric, values in expected.values["data"].items():
        tolerance = 2e-6 if device.type == "cpu" else 1e-5
        np.testing.assert_allclose(found.values["data"][metric], values, tolerance, 0.021 * (metric != "loss"))
    assert np.ptp(expected.values["data"]["loss"]) > 1e-2
    assert calls
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def test_first_layers_share_their_input_and_others_have_one_for_each(calls):
    models = three(MODELS["perceptron"], CPU)
    result = scan_line(*models, evaluator(models, CPU), 3 + 4 + 4 + 2)
    groups = 4  # one that is compared, two of 4 points and one of 2, filled up
    batches = [16, 16, 16, 2]
    assert calls == [shape for _ in range(groups) for n in batches for shape in ((n, 6), (4, n, 8), (4, n, 8))]
    assert len(result.alphas) == 13


def test_two_splits_and_several_metrics(device):
    models = three(MODELS["perceptron"], device)

    def splits(number):
        options = {"batch_size": 20, "alphas_at_once": number, "share_first_layer": False}
        error = {"mean": lambda z, y: (z.argmax(1) != y).float().mean(), "loss": lambda z, y: z.square()}
        weighted = {"weighted": lambda z, y: (z[:, 0], y + 1)}
        return {
            "one": Evaluator(examples(device, 1), metrics=error, **options),
            "two": Evaluator(examples(device, 2), metrics=weighted, **options),
        }

    found, expected = (scan_line(*models, splits(number), 21, higher_is_better=()) for number in (AT_ONCE, 1))
    assert at_once(found, "two")["number"] == AT_ONCE
    for split, table in expected.values.items():
        for metric, values in table.items():
            np.testing.assert_allclose(found.values[split][metric], values, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_evaluated_one_by_one(name, device):
    make, why_not = REFUSED[name]
    models = three(make, device)
    found = scan_line(*models, evaluator(models, device), 21)
    assert at_once(found)["number"] == 1
    assert why_not in at_once(found)["why_not"]
    expected = singly(models, device, 21).values["data"]["loss"]
    np.testing.assert_allclose(found.values["data"]["loss"], expected, rtol=0 if device.type == "cpu" else 1e-5)


@pytest.mark.parametrize("metrics", [["accuracy"], None, {"constant": lambda z, y: 0 * z[:, 0]}])
def test_models_at_once_are_compared_far_from_each_other(metrics, device):
    """Where neighbours are so close that one's weights in the place of another's make no difference."""
    models, points = three(Aside, device), [*np.linspace(0, 1e-5, 9).tolist(), *np.linspace(0.9, 1, 9).tolist()]
    found = scan_line(*models, evaluator(models, device, metrics=metrics), points)
    assert "other values than one by one" in at_once(found)["why_not"]
    expected = singly(models, device, points, metrics=metrics)
    for name, values in expected.values["data"].items():
        np.testing.assert_allclose(found.values["data"][name], values, atol=0 if device.type == "cpu" else 0.021)


def test_hooks_autocast_and_few_points_are_reasons(device):
    models = three(MODELS["perceptron"], device)
    assert at_once(scan_line(*models, evaluator(models, device), 9))["why_not"] is None
    assert at_once(scan_line(*models, evaluator(models, device), 7))["why_not"] == "there were too few points"
    half = scan_line(*models, evaluator(models, device, dtype=torch.bfloat16), 21)
    assert at_once(half)["why_not"] == "the model runs under autocast"
    adaptive = scan_line(*models, evaluator(models, device), "adaptive", tol=0.1)
    assert at_once(adaptive)["why_not"] == "each point depends on the values of those before"
    models[0][0].register_forward_pre_hook(lambda module, inputs: None)
    assert at_once(scan_line(*models, evaluator(models, device), 21))["why_not"] == "the model has hooks"


def test_curves_and_random_lines_are_evaluated_point_by_point():
    models = three(MODELS["perceptron"], CPU)
    curve = Curve("bezier", *map(FlatState.from_module, models))
    for result in (
        scan_curve(models[0], curve, evaluator(models, CPU), 21),
        random_line(models[0], evaluator(models, CPU), 21),
    ):
        why_not = "only the models on a straight line are evaluated several at once"
        assert at_once(result) == {"number": 1, "why_not": why_not}


def test_a_cpu_does_so_only_if_asked_to(monkeypatch):
    models = three(MODELS["perceptron"], CPU)
    result = scan_line(*models, evaluator(models, CPU, alphas_at_once="auto"), 41)
    assert at_once(result) == {"number": 1, "why_not": "it is slower on the device 'cpu'"}
    assert several.number_of({"data": evaluator(models, CPU, alphas_at_once="auto")}, InOrder(CPU), "auto") == 1
    monkeypatch.setattr(InOrder, "background", True)
    assert several.number_of({"data": evaluator(models, CPU, alphas_at_once="auto")}, InOrder(CPU), "auto") == 16
    both = {"one": evaluator(models, CPU, alphas_at_once="auto"), "two": evaluator(models, CPU, alphas_at_once=8)}
    assert several.number_of(both, InOrder(CPU), "auto") == 8


@pytest.mark.parametrize("given", [0, -1, 2.0, "all"])
def test_other_numbers_are_refused(given):
    with pytest.raises(InputError, match="alphas_at_once="):
        Evaluator(examples(CPU), alphas_at_once=given)


def test_a_graph_serves_every_group(device, in_order, monkeypatch):
    """On a CPU with a multi_linear that reads no factors, as on a GPU."""

    def multi_linear(x, weight_a, weight_b, alphas, *, bias_a=None, bias_b=None, backend="auto"):
        weights = weight_a + alphas.float()[:, None, None] * (weight_b - weight_a)
        biases = bias_a + alphas.float()[:, None] * (bias_b - bias_a)
        return x @ weights.mT + biases[:, None]

    if device.type == "cpu":
        monkeypatch.setattr(ops, "multi_linear", multi_linear)
    models, forward, passes = three(MODELS["perceptron"], device), nn.Sequential.forward, []

    def counting(model, x):
        passes.append(len(x))
        return forward(model, x)

    monkeypatch.setattr(nn.Sequential, "forward", counting)
    in_order(background=True, graphs=True)
    counts = []
    for points in (41, 81):
        passes.clear()
        found = scan_line(*models, evaluator(models, device, alphas_at_once=5), points)
        assert found.choices["splits"]["data"]["graph"] == {"captured": True, "why_not": None}
        assert at_once(found) == {"number": 5, "why_not": None}
        counts.append(len(passes))
    assert counts[0] == counts[1]
    in_order(background=False)
    expected = singly(models, device, 81).values["data"]["loss"]
    np.testing.assert_allclose(found.values["data"]["loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_and_progress_know_single_points(background, in_order, tmp_path):
    in_order(background=background)
    models, seen = three(MODELS["perceptron"], CPU), []

    def interrupt(done, total, _values):
        seen.append((done, total))
        if done == 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        scan_line(*models, evaluator(models, CPU), 21, checkpoint=tmp_path / "scan", progress=interrupt)
    assert seen == [(done, 21) for done in range(1, 14)]
    assert len(caught.value.partial.alphas) == 13
    assert len((tmp_path / "scan").read_text().splitlines()) == 1 + 13
    resumed = scan_line(*models, evaluator(models, CPU), 21, checkpoint=tmp_path / "scan")
    np.testing.assert_allclose(
        resumed.values["data"]["loss"], singly(models, CPU, 21).values["data"]["loss"], rtol=2e-6
    )


def test_an_error_among_several_names_them_and_keeps_the_points_before(monkeypatch):
    models, calls, multi_linear = three(MODELS["one layer"], CPU), [], ops.multi_linear

    def failing(*args, **kwargs):
        calls.append(args[0].shape)
        if len(calls) > 4 * 3:  # batches of groups: the one that is compared, and two more
            raise RuntimeError("out of memory\nand more")
        return multi_linear(*args, **kwargs)

    monkeypatch.setattr(ops, "multi_linear", failing)
    message = r"evaluating alpha = 0.45 and 3 more at once failed \(RuntimeError: out of memory\); .* alphas_at_once=1"
    with pytest.raises(EvaluationError, match=message) as caught:
        scan_line(*models, evaluator(models, CPU), 21)
    assert len(caught.value.partial.alphas) == 3 + 2 * 4
    assert not caught.value.partial.complete


def test_every_layer_gets_its_own_ends(monkeypatch):
    models, seen = three(Residual, CPU), []

    def looking(x, weight_a, weight_b, alphas, *, bias_a=None, bias_b=None, backend="auto"):
        seen.append((weight_a, weight_b, bias_a, bias_b))
        rows = [lerp(weight_a, weight_b, alpha) for alpha in alphas.tolist()]
        return torch.stack([(x if x.dim() == 2 else x[k]) @ weight.T for k, weight in enumerate(rows)])

    monkeypatch.setattr(ops, "multi_linear", looking)
    _, a, b = models
    result = scan_line(*models, evaluator(models, CPU), 9)  # without biases, which is found out
    assert "other values" in at_once(result)["why_not"]
    layers = ["first", "middle", "again", "last"]
    for layer, (weight_a, weight_b, bias_a, bias_b) in zip(layers, seen[:4], strict=True):
        for end, weight, bias in ((a, weight_a, bias_a), (b, weight_b, bias_b)):
            assert torch.equal(weight, end.get_submodule(layer).weight)
            own = end.get_submodule(layer).bias
            assert (bias is None) == (own is None)
            assert own is None or torch.equal(bias, own)
