"""The pages in docs/ against the code that they describe."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pytest
import torch

import isthmus
from isthmus import match, methods
from isthmus.train import MLP

mpl.use("agg")

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "methods.md"
METHODS = methods.available()


def sections():
    """The page's text by method."""
    parts = PAGE.read_text(encoding="utf-8").split("\n### ")[1:]
    named = (part.split("\n", 1) for part in parts)
    return {name.strip("`"): text.split("\n## ")[0] for name, text in named}


def table(text, header):
    """The rows of the table with this header, without its rule."""
    lines = text[text.index(header) :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines]
    return rows[:1] + rows[2:]


def written(value):
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def test_every_method_has_a_section():
    assert sorted(sections()) == sorted(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_table_of_options_and_presets(name):
    info = METHODS[name]
    if not info.options:
        assert "It has no options." in sections()[name]
        return
    presets = [preset for preset in info.presets if preset != "paper"]
    expected = [["option", "default", *(f"`{preset}`" for preset in presets)]]
    for option in info.options:
        unset = "equal" if option.name == "weights" else "none"
        default = "required" if option.required else unset if option.default is None else written(option.default)
        changes = [info.presets[preset] for preset in presets]
        cells = [written(changed[option.name]) if option.name in changed else "" for changed in changes]
        expected.append([f"`{option.name}`", default, *cells])
    assert table(sections()[name], "| option | default |") == expected


@pytest.mark.parametrize("name", METHODS)
def test_every_option_is_explained(name):
    """In the table of the options that the task vector methods share, or in the text of the method's section."""
    shared = {row[0] for row in table(PAGE.read_text(encoding="utf-8"), "| option | value | meaning |")}
    text = sections()[name].split("| option | default |")[0]
    missing = [option.name for option in METHODS[name].options if f"`{option.name}`" not in shared]
    assert [option for option in missing if f"`{option}`" not in text] == []


@pytest.mark.parametrize(
    ("page", "title"),
    [
        ("README.md", "Match"),
        ("docs/matching.md", "Specs"),
        ("docs/matching.md", "Matching"),
        ("docs/matching.md", "Many models"),
        ("docs/matching.md", "REPAIR and BatchNorm"),
    ],
)
def test_the_code_on_matching_runs(page, title):
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :3].argmax(1)
    model, a, b, c, d = (MLP(6, [8], 3) for _ in range(5))
    names = {"isthmus": isthmus, **vars(match), "model": model, "a": a, "b": b, "c": c, "d": d, "inputs": inputs}
    names |= {"b2": b, "example_inputs": inputs[:2], "data": [(inputs, targets)]}
    names |= {"evaluate": isthmus.Evaluator((inputs, targets)), "spec": match.PermutationSpec.from_model(a, inputs[:2])}
    section = (ROOT / page).read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    blocks = [block.split("```")[0] for block in section.split("```python\n")[1:]]
    assert blocks
    for block in blocks:
        exec(block, names)
