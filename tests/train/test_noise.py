from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import InputError
from isthmus.train import NoiseScale


def test_values_by_hand() -> None:
    assert NoiseScale(0.1, 16).value == pytest.approx(0.00625)
    assert NoiseScale(0.1, 16, momentum=0.9).value == pytest.approx(0.0625)
    assert NoiseScale(0.4, 128, momentum=0.9).value == pytest.approx(0.03125)
    assert NoiseScale(0.1, 16, momentum=0.9, exponent=2).value == pytest.approx(0.625)
    assert NoiseScale(0.1, 16, momentum=0.9, exponent=0).value == pytest.approx(0.00625)
    assert NoiseScale(0.1, 16, rule="adam").value == pytest.approx(0.025)


@given(
    lr=st.floats(1e-6, 10),
    batch=st.integers(1, 4096),
    momentum=st.floats(0, 0.99),
    exponent=st.floats(0, 2),
    value=st.floats(1e-6, 10),
)
def test_solved_learning_rate_has_the_noise_scale(
    lr: float, batch: int, momentum: float, exponent: float, value: float
) -> None:
    for scale in (NoiseScale(lr, batch, momentum, exponent), NoiseScale(lr, batch, rule="adam")):
        solved = scale.solve(value, vary="lr")
        assert solved.value == pytest.approx(value, rel=1e-12)
        assert solved.batch_size == batch


@given(lr=st.floats(1e-6, 10), batch=st.integers(1, 4096), other=st.integers(1, 4096), adam=st.booleans())
def test_solved_batch_size_is_the_one_that_made_the_noise_scale(lr: float, batch: int, other: int, adam: bool) -> None:
    def scale(size: int) -> NoiseScale:
        return NoiseScale(lr, size, rule="adam") if adam else NoiseScale(lr, size, 0.9)

    assert scale(batch).solve(scale(other).value, vary="batch_size") == scale(other)


def test_batch_size_that_is_no_integer_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"a batch of 10\.6667 examples.*batch_size=11 with a noise scale of 0\.00909"):
        NoiseScale(0.1, 16).solve(0.1 / 16 * 1.5, vary="batch_size")
    with pytest.raises(InputError, match=r"batch_size=1 "):
        NoiseScale(0.1, 16).solve(100, vary="batch_size")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0, expected a positive number"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 1.5}, "batch_size is 1.5"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"momentum": -0.1}, "momentum is -0.1"),
        ({"exponent": float("inf")}, "exponent is inf"),
        ({"rule": "lion"}, "rule is 'lion'"),
        ({"rule": "adam", "momentum": 0.9}, "leave momentum at 0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        NoiseScale(**({"lr": 0.1, "batch_size": 16} | arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_noise_scale_to_solve_for_must_be_positive(value: float) -> None:
    with pytest.raises(InputError, match="expected a positive number"):
        NoiseScale(0.1, 16).solve(value, vary="lr")


def test_unknown_variable_to_solve_for() -> None:
    with pytest.raises(InputError, match="vary is 'momentum'"):
        NoiseScale(0.1, 16).solve(0.1, vary="momentum")  # type: ignore[arg-type]
