"""Specs of tiny modules, one for each kind of operator: what moves is written out, and verified numerically.

``PermutationSpec.from_model`` warns of groups that change the outputs, and warnings are errors in tests.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Conv1d, Conv2d, Linear, functional

from isthmus.errors import InputError
from isthmus.match import PermutationSpec
from isthmus.match.spec import Axis

ROW = torch.zeros(2, 6)
SEQUENCE = torch.zeros(2, 5, 8)
IMAGE = torch.zeros(2, 3, 8, 8)


class Net(nn.Module):
    """A module whose forward pass is a function of it and its inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def written(axis: Axis) -> str:
    """An axis on one line: ``*`` in products, ``+`` in concatenations."""
    return " + ".join("*".join(group or str(size) for size, group in segment) for segment in axis)


def check(model: nn.Module, inputs: object, groups: dict[str, object], **axes: str) -> PermutationSpec:
    """Trace and verify; compare the groups, and the axes of some tensors, ``a_weight="a, 6"``."""
    spec = PermutationSpec.from_model(model, inputs)
    found = {group.name: (group.size, group.within) if group.within else group.size for group in spec.groups.values()}
    assert found == groups
    spelled = {key.replace(".", "_"): ", ".join(map(written, tensor_axes)) for key, tensor_axes in spec.axes.items()}
    assert {key: spelled[key] for key in axes} == axes
    for key, tensor_axes in spec.axes.items():  # what stays has a reason, what moves has none
        for dimension, axis in enumerate(tensor_axes):
            stays = any(group is None and size > 1 for segment in axis for size, group in segment)
            assert not stays or spec.frozen[key, dimension]
    return spec


def sandwich(function, width, *, after=None, **parts):
    """A linear layer, what a function makes of its output, and another linear layer."""
    return Net(
        lambda m, x: m.c(function(m, m.a(x))),
        a=Linear(6, width),
        c=Linear(width if after is None else after, 3),
        **parts,
    )


class TestPieces:
    def test_concatenation(self):
        model = Net(
            lambda m, x: m.c(torch.cat([m.a(x), m.b(x).relu()], 1)), a=Linear(6, 4), b=Linear(6, 5), c=Linear(9, 3)
        )
        check(model, ROW, {"a": 4, "b": 5}, a_weight="a, 6", b_weight="b, 6", c_weight="3, a + b", c_bias="3")

    def test_gate_from_halves(self):
        def gate(m, h):
            one, other = h.chunk(2, -1)
            return one * other.sigmoid()

        check(sandwich(gate, 8, after=4), ROW, {"a": 4}, a_weight="a + a, 6", a_bias="a + a", c_weight="3, a")
        check(sandwich(lambda m, h: functional.glu(h), 8, after=4), ROW, {"a": 4}, a_weight="a + a, 6", c_weight="3, a")

    def test_gate_from_blocks(self):
        def gate(m, h):
            blocks = h.view(2, 2, 4)
            return blocks[:, 0] * blocks[:, 1].sigmoid()

        check(sandwich(gate, 8, after=4), ROW, {"a": 4}, a_weight="a + a, 6", c_weight="3, a")

    def test_slices_that_overlap(self):
        model = Net(
            lambda m, x: (lambda h: m.b(h[:, :5]) + m.c(h[:, 3:]))(m.a(x)),
            a=Linear(6, 8),
            b=Linear(5, 2),
            c=Linear(5, 2),
        )
        groups = {"a": 3, "a.2": 2, "a.3": 3}
        check(model, ROW, groups, a_weight="a + a.2 + a.3, 6", b_weight="2, a + a.2", c_weight="2, a.2 + a.3")

    def test_split_of_a_concatenation(self):
        def again(m, h):
            left, right = torch.cat([h, m.b(h)], 1).split([3, 6], 1)
            return torch.cat([right, left], 1)

        model = sandwich(again, 4, after=9, b=Linear(4, 5))
        groups = {"a": 3, "a.2": 1, "b": 5}
        spec = PermutationSpec.from_model(model, ROW)
        assert {name: group.size for name, group in spec.groups.items()} == {k: v for k, v in groups.items() if v > 1}
        assert written(spec.axes["c.weight"][1]) == "1 + b + a"

    def test_shift_ties_every_unit_to_the_next(self):
        spec = check(sandwich(lambda m, h: h[:, :-1] + h[:, 1:], 8, after=7), ROW, {}, a_weight="8, 6")
        assert spec.frozen["a.weight", 0] == "its units are told apart one by one"

    def test_writing_into_a_slice(self):
        def erase(m, h):
            h = h * 1
            h[:, :2] = 0
            return h

        check(sandwich(erase, 5), ROW, {"a": 2, "a.2": 3}, a_weight="a + a.2, 6", c_weight="3, a + a.2")

    def test_stack_and_sum(self):
        model = sandwich(lambda m, h: torch.stack([h, m.b(h)], 1).sum(1), 4, b=Linear(4, 4))
        check(model, ROW, {"a": 4}, b_weight="a, a", c_weight="3, a")


class TestBlocks:
    """Reshapes divide an axis; what is done with its blocks decides what stays free."""

    def test_blocks_that_are_merged_again(self):
        model = sandwich(lambda m, h: h.view(2, 3, 4).softmax(-1).view(2, 12), 12)
        groups = {"a.blocks": 3, "a.units": (4, "a.blocks")}
        check(model, ROW, groups, a_weight="a.blocks*a.units, 6", c_weight="3, a.blocks*a.units")

    def test_units_that_meet_across_blocks(self):
        model = sandwich(lambda m, h: h.view(2, 3, 4).softmax(1).view(2, 12), 12)
        check(model, ROW, {"a": 3, "a.2": 4}, a_weight="a*a.2, 6", c_weight="3, a*a.2")

    def test_sums_over_blocks_and_within_them(self):
        check(sandwich(lambda m, h: h.view(2, 3, 4).sum(1), 12, after=4), ROW, {"a": 3, "a.2": 4}, c_weight="3, a.2")
        within = {"a.blocks": 3, "a.units": (4, "a.blocks")}
        check(sandwich(lambda m, h: h.view(2, 3, 4).sum(2), 12, after=3), ROW, within, c_weight="3, a.blocks")

    def test_matrix_that_all_blocks_share(self):
        model = sandwich(lambda m, h: (h.view(2, 2, 3) @ m.w).flatten(1), 6, after=8, w=nn.Parameter(torch.zeros(3, 4)))
        check(model, ROW, {"a": 2, "a.2": 3, "w": 4}, w="a.2, w", a_weight="a*a.2, 6", c_weight="3, a*w")

    def test_matrices_of_the_blocks(self):
        weight = nn.Parameter(torch.zeros(2, 3, 4))
        model = sandwich(
            lambda m, h: torch.einsum("nbi,bio->nbo", h.view(2, 2, 3), m.w).relu().flatten(1), 6, after=8, w=weight
        )
        check(model, ROW, {"a": 2, "a.2": 3, "w": 4}, w="a, a.2, w", a_weight="a*a.2, 6", c_weight="3, a*w")

    def test_blocks_that_stay_have_units_of_their_own(self):
        model = sandwich(lambda m, h: (h.view(2, 3, 4) * torch.arange(3.0)[:, None]).relu().flatten(1), 12)
        check(model, ROW, {"a": 4, "a.2": 4, "a.3": 4}, a_weight="a + a.2 + a.3, 6", c_weight="3, a + a.2 + a.3")

    def test_transposed(self):
        model = sandwich(lambda m, h: h.view(2, 3, 4).transpose(1, 2).reshape(2, 12), 12)
        check(model, ROW, {"a": 3, "a.2": 4}, a_weight="a*a.2, 6", c_weight="3, a.2*a")

    def test_divisions_that_clash(self):
        model = sandwich(lambda m, h: h.view(2, 3, 4).softmax(-1).view(2, 4, 3).softmax(-1).view(2, 12), 12)
        spec = check(model, ROW, {}, a_weight="12, 6")
        assert spec.frozen["a.bias", 0] == "a reshape from (3, 4) to (4, 3) cuts through it"
        two = Net(
            lambda m, x: m.c(
                m.a(x).view(2, 3, 4).softmax(-1).view(2, 12) + m.b(x).view(2, 4, 3).softmax(-1).view(2, 12)
            ),
            a=Linear(6, 12),
            b=Linear(6, 12),
            c=Linear(12, 3),
        )
        spec = check(two, ROW, {}, a_weight="12, 6", b_weight="12, 6", c_weight="3, 12")
        assert spec.frozen["b.bias", 0] == "it meets axes that are divided in another way"

    def test_the_largest_of_each_block(self):
        check(
            sandwich(lambda m, h: h.view(2, 4, 3).amax(2), 12, after=4),
            ROW,
            {"a.blocks": 4, "a.units": (3, "a.blocks")},
        )

    def test_repeats(self):
        check(sandwich(lambda m, h: h.repeat(1, 3), 4, after=12), ROW, {"a": 4, "c": 3}, c_weight="3, c*a")
        groups = {"a.blocks": 4, "c.units": (3, "a.blocks")}
        model = sandwich(lambda m, h: h.repeat_interleave(3, 1), 4, after=12)
        check(model, ROW, groups, a_weight="a.blocks, 6", c_weight="3, a.blocks*c.units")

    def test_outer_product_with_itself(self):
        model = sandwich(lambda m, h: (h[:, :, None] * h[:, None, :]).flatten(1), 4, after=16)
        assert check(model, ROW, {}).frozen["c.weight", 1] == "it is twice in one product"


class TestConvolutions:
    def test_flattened(self):
        model = nn.Sequential(Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), Linear(36, 3))
        spec = check(model, IMAGE, {"0": 4}, **{"0_weight": "0, 3, 3, 3", "4_weight": "3, 0*9"})
        assert spec.frozen["0.weight", 2] == "it holds the places of a kernel"

    def test_flattened_with_the_channels_last(self):
        model = Net(lambda m, x: m.c(m.a(x).permute(0, 2, 3, 1).flatten(1)), a=Conv2d(3, 4, 3), c=Linear(144, 3))
        check(model, IMAGE, {"a": 4}, c_weight="3, 36*a")

    def test_groups(self):
        model = nn.Sequential(Conv2d(3, 8, 1), nn.ReLU(), Conv2d(8, 12, 3, groups=4), nn.ReLU(), Conv2d(12, 2, 1))
        groups = {"0.blocks": 4, "0": 2, "2.units": (3, "0.blocks")}
        axes = {"0_weight": "0.blocks*0, 3, 1, 1", "2_weight": "0.blocks*2.units, 0, 3, 3"}
        check(model, IMAGE, groups, **axes, **{"4_weight": "2, 0.blocks*2.units, 1, 1"})

    def test_depthwise(self):
        model = nn.Sequential(Conv2d(3, 4, 1), Conv2d(4, 4, 3, groups=4), nn.ReLU(), Conv2d(4, 2, 1))
        check(model, IMAGE, {"0": 4}, **{"1_weight": "0, 1, 3, 3", "3_weight": "2, 0, 1, 1"})
        doubled = nn.Sequential(Conv2d(3, 4, 1), Conv2d(4, 8, 3, groups=4), nn.ReLU(), Conv2d(8, 2, 1))
        groups = {"0.blocks": 4, "1.units": (2, "0.blocks")}
        check(
            doubled, IMAGE, groups, **{"1_weight": "0.blocks*1.units, 1, 3, 3", "3_weight": "2, 0.blocks*1.units, 1, 1"}
        )

    def test_transposed(self):
        model = nn.Sequential(Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 6, 2, 2), nn.PReLU(6), Conv2d(6, 2, 1))
        check(model, IMAGE, {"0": 8, "1": 6}, **{"1_weight": "0, 1, 2, 2", "2_weight": "1", "3_weight": "2, 1, 1, 1"})

    def test_over_the_positions_of_a_sequence(self):
        model = nn.Sequential(Conv1d(5, 7, 1), nn.GELU(), Conv1d(7, 5, 1), Linear(8, 6), nn.ReLU(), Linear(6, 3))
        check(model, SEQUENCE, {"0": 7, "3": 6}, **{"2_weight": "5, 0, 1", "5_weight": "3, 3"})

    def test_channel_shuffle(self):
        def shuffle(m, x):
            return m.c(torch.cat([m.a(x), m.b(x)], 1).view(2, 2, 4, 8, 8).transpose(1, 2).reshape(2, 8, 8, 8))

        model = Net(shuffle, a=Conv2d(3, 4, 1), b=Conv2d(3, 4, 1), c=Conv2d(8, 2, 1))
        check(model, IMAGE, {"a": 4}, b_weight="a, 3, 1, 1", c_weight="2, a*2, 1, 1")

    def test_pixel_shuffle(self):
        model = nn.Sequential(Conv2d(3, 8, 1), nn.PixelShuffle(2), Conv2d(2, 2, 1))
        check(model, IMAGE, {"0": 2}, **{"0_weight": "0*4, 3, 1, 1", "2_weight": "2, 0, 1, 1"})

    def test_bilinear(self):
        check(
            Net(lambda m, x: m.c(m.a(x, x)), a=nn.Bilinear(6, 6, 5), c=Linear(5, 3)), ROW, {"a": 5}, a_weight="a, 6, 6"
        )


class TestNorms:
    def test_batch_norm(self):
        model = nn.Sequential(Linear(6, 7), nn.BatchNorm1d(7), nn.GELU(), Linear(7, 3))
        spec = check(model, ROW, {"0": 7}, **{"1_weight": "0", "1_running_var": "0", "3_weight": "3, 0"})
        assert spec.statistics == {"1.running_mean", "1.running_var"}

    def test_group_norm(self):
        model = nn.Sequential(Conv2d(3, 8, 1), nn.GroupNorm(4, 8), Conv2d(8, 2, 1))
        axes = {"1_weight": "0.blocks*0.units", "2_weight": "2, 0.blocks*0.units, 1, 1"}
        check(model, IMAGE, {"0.blocks": 4, "0.units": (2, "0.blocks")}, **axes)

    @pytest.mark.parametrize("norm", [nn.GroupNorm(1, 8), nn.GroupNorm(8, 8), nn.InstanceNorm2d(8, affine=True)])
    def test_norms_of_all_or_single_channels(self, norm):
        check(
            nn.Sequential(Conv2d(3, 8, 1), norm, Conv2d(8, 2, 1)),
            IMAGE,
            {"0": 8},
            **{"1_weight": "0", "2_weight": "2, 0, 1, 1"},
        )

    @pytest.mark.parametrize("norm", [nn.LayerNorm(7), nn.RMSNorm(7), nn.Softmax(-1), nn.PReLU()])
    def test_over_the_last_axis(self, norm):
        check(nn.Sequential(Linear(6, 7), norm, Linear(7, 3)), ROW, {"0": 7}, **{"2_weight": "3, 0"})

    def test_unit_length(self):
        check(sandwich(lambda m, h: functional.normalize(h, dim=1), 4), ROW, {"a": 4}, c_weight="3, a")


class TestAttention:
    @staticmethod
    def heads(x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, -1)).transpose(1, 2)

    def test_multihead_attention(self):
        model = nn.MultiheadAttention(8, 2)
        groups = {"heads": 2, "query_key": (4, "heads"), "value": (4, "heads")}
        axes = {"in_proj_bias": "heads*query_key + heads*query_key + heads*value", "out_proj_weight": "8, heads*value"}
        check(model, (torch.zeros(5, 2, 8),) * 3, groups, **axes)

    def test_fused_projection_whose_parts_are_selected(self):
        def attention(m, x):
            q, k, v = m.qkv(x).reshape(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
            return m.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 8))

        groups = {"heads": 2, "query_key": (4, "heads"), "value": (4, "heads")}
        axes = {"qkv_bias": "heads*query_key + heads*query_key + heads*value", "o_weight": "3, heads*value"}
        check(Net(attention, qkv=Linear(8, 24), o=Linear(8, 3)), SEQUENCE, groups, **axes)

    def test_fused_projection_by_heads(self):
        def attention(m, x):
            q, k, v = self.heads(m.qkv(x), 2).chunk(3, -1)
            return m.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 8))

        spec = check(
            Net(attention, qkv=Linear(8, 24), o=Linear(8, 3)),
            SEQUENCE,
            {"heads": 2},
            qkv_bias="heads*12",
            o_weight="3, heads*4",
        )
        assert spec.frozen["qkv.bias", 0] == "inside each unit of another group it is put together of several parts"

    @pytest.mark.parametrize("repeated", [False, True])
    def test_grouped_queries(self, repeated):
        def attention(m, x):
            q, k, v = self.heads(m.q(x), 4), self.heads(m.k(x), 2), self.heads(m.v(x), 2)
            if repeated:
                k, v = k.repeat_interleave(2, 1), v[:, :, None].expand(2, 2, 2, 5, 2).reshape(2, 4, 5, 2)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeated)
            return m.o(mixed.transpose(1, 2).flatten(2))

        model = Net(attention, q=Linear(8, 8), k=Linear(8, 4), v=Linear(8, 4), o=Linear(8, 3))
        groups = dict.fromkeys(("queries", "query_key", "value"), (2, "heads")) | {"heads": 2}
        axes = {"q_bias": "heads*queries*query_key", "k_bias": "heads*query_key", "o_weight": "3, heads*queries*value"}
        check(model, SEQUENCE, groups, **axes)

    @pytest.mark.parametrize("kept", [False, True])
    def test_rotary(self, kept):
        """Columns move by pairs, in all heads alike, if the frequencies are in the state dict; else they stay."""

        def rotated(m, x):
            angles = torch.arange(5.0, dtype=x.dtype)[:, None] * m.frequencies
            angles = torch.cat([angles, angles], -1)
            return x * angles.cos() + torch.cat([-x[..., 2:], x[..., :2]], -1) * angles.sin()

        def attention(m, x):
            q, k, v = (self.heads(part(x), 2) for part in (m.q, m.k, m.v))
            mixed = functional.scaled_dot_product_attention(rotated(m, q), rotated(m, k), v)
            return m.o(mixed.transpose(1, 2).flatten(2))

        model = Net(attention, **{name: Linear(8, 8) for name in "qkv"}, o=Linear(8, 3))
        model.register_buffer("frequencies", torch.tensor([1.0, 0.1]), persistent=kept)
        groups = {"heads": 2, "value": (4, "heads")}
        if kept:
            groups["query_key"] = 2
            check(model, SEQUENCE, groups, frequencies="query_key", q_bias="heads*2*query_key", v_bias="heads*value")
        else:
            spec = check(model, SEQUENCE, groups, q_bias="heads*4", k_bias="heads*4", v_bias="heads*value")
            assert spec.frozen["q.bias", 0] == "it meets the constant frequencies"


class TestLookups:
    def test_tied_embedding(self):
        model = Net(
            lambda m, i: m.d(m.h(m.e(i)).relu()), e=nn.Embedding(9, 6), h=Linear(6, 6), d=Linear(6, 9, bias=False)
        )
        model.d.weight = model.e.weight
        spec = check(model, torch.tensor([[1, 2]]), {"e": 6}, e_weight="9, e", d_weight="9, e", h_weight="e, e")
        assert spec.frozen["d.weight", 0] == "its rows are looked up by index"

    def test_rows_of_a_table(self):
        model = sandwich(lambda m, h: h + m.p[torch.tensor([0, 2])], 4, p=nn.Parameter(torch.zeros(3, 4)))
        check(model, ROW, {"a": 4}, p="3, a")

    def test_one_layer_called_twice(self):
        model = Net(lambda m, x: m.c(m.a(m.a(m.b(x)).relu())), b=Linear(6, 5), a=Linear(5, 5), c=Linear(5, 3))
        check(model, ROW, {"b": 5}, a_weight="b, b", c_weight="3, b")

    def test_layer_that_is_not_used(self):
        spec = check(Net(lambda m, x: m.c(x), a=Linear(6, 4), c=Linear(6, 3)), ROW, {}, a_weight="4, 6")
        assert spec.frozen["a.weight", 0] == "the forward pass does not use it"


class TestOtherSizes:
    """Traced on short inputs, verified on long ones: of what is sliced to a length, nothing moves."""

    def attention(self, length):
        """Causal attention with sliced positions and a sliced mask, as in small GPTs."""

        def forward(m, ids):
            n = ids.shape[1]
            x = m.tokens(ids) + m.table(m.position_ids[:, :n]) + m.pe[:n] + m.scaled.tanh()[:n]
            q, k, v = (part.view(len(x), n, 2, 4).transpose(1, 2) for part in m.qkv(x).split(8, 2))
            scores = (q @ k.transpose(-1, -2)).masked_fill(m.mask[:, :, :n, :n] == 0, float("-inf"))
            return m.c(x + m.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))

        parts = {"tokens": nn.Embedding(11, 8), "table": nn.Embedding(length, 8), "qkv": Linear(8, 24)}
        model = Net(forward, **parts, out=Linear(8, 8), c=Linear(8, 11), scaled=nn.Parameter(torch.randn(length, 8)))
        model.register_buffer("position_ids", torch.arange(length)[None])
        model.register_buffer("mask", torch.ones(length, length).tril()[None, None])
        model.register_buffer("pe", torch.randn(length, 8))
        return model

    def test_positions_and_masks(self):
        model = self.attention(16)
        groups = {"tokens": 8, "heads": 2, "query_key": (4, "heads"), "value": (4, "heads")}
        spec = check(
            model, torch.arange(10).view(2, 5), groups, mask="1, 1, 16, 16", position_ids="1, 16", pe="16, tokens"
        )
        assert spec.frozen["mask", 2] == "it meets an input; example_inputs do not reach it"
        for length in (5, 6, 15, 16):
            spec.verify(model, torch.arange(2 * length).view(2, length) % 11)

    @pytest.mark.parametrize("length", [2, 3, 4])
    def test_weights_of_positions(self, length):
        """Their rows are summed over: those that are read would be free, were there no others."""

        def forward(m, x):
            n = x.shape[1]
            return m.c((m.w[:n, :n] @ m.a(x)).tanh()).mean(1)

        model = Net(forward, a=Linear(6, 4), c=Linear(4, 3), w=nn.Parameter(torch.randn(5, 5)))
        spec = check(model, torch.rand(2, length, 6), {"a": 4}, w="5, 5")
        assert spec.frozen["w", 0] == "example_inputs reach only a part of it; example_inputs do not reach it"
        for other in (2, 3, 4, 5):
            spec.verify(model, torch.rand(2, other, 6))

    @pytest.mark.parametrize(
        "positions", [lambda m, n: m.t[:n] + m.t.sum(0), lambda m, n: (m.t - m.t.mean(0))[:n]], ids=["raw", "centred"]
    )
    def test_tables_that_are_also_summed(self, positions):
        model = Net(
            lambda m, x: m.c((m.a(x) + positions(m, x.shape[1])).tanh()),
            a=Linear(6, 4),
            c=Linear(4, 3),
            t=nn.Parameter(torch.randn(9, 4)),
        )
        spec = check(model, torch.rand(2, 3, 6), {"a": 4}, t="9, a")
        spec.verify(model, torch.rand(2, 7, 6))

    def test_every_block_that_is_taken_moves(self):
        """Slices that together are all of an axis leave it free."""
        model = Net(
            lambda m, x: m.c((m.w[:2] @ m.a(x).T).T + (m.w[2:] @ m.a(x).T).T),
            a=Linear(6, 4),
            c=Linear(2, 3),
            w=nn.Parameter(torch.randn(4, 4)),
        )
        check(model, ROW, {"a": 4, "w": 2}, w="w + w, a", c_weight="3, w")


class TestNormalisedWeights:
    def test_weight_norm(self):
        def normed(**options):
            return nn.utils.parametrizations.weight_norm(Linear(4, 4), **options)

        original = "b_parametrizations_weight_original"
        axes = {f"{original}0": "b, 1", f"{original}1": "b, a", "c_weight": "3, b"}
        check(sandwich(lambda m, h: m.b(h.relu()).relu(), 4, b=normed()), ROW, {"a": 4, "b": 4}, **axes)
        axes = {f"{original}0": "1, a", f"{original}1": "b, a", "c_weight": "3, b"}
        check(sandwich(lambda m, h: m.b(h.relu()).relu(), 4, b=normed(dim=1)), ROW, {"a": 4, "b": 4}, **axes)
        axes = {f"{original}0": "", f"{original}1": "b, a", "c_weight": "3, b"}
        check(sandwich(lambda m, h: m.b(h.relu()).relu(), 4, b=normed(dim=None)), ROW, {"a": 4, "b": 4}, **axes)

    def test_spectral_norm(self):
        model = sandwich(lambda m, h: m.b(h.relu()).relu(), 4, b=nn.utils.parametrizations.spectral_norm(Linear(4, 5)))
        model.c = Linear(5, 3)
        vectors = {"b_parametrizations_weight_0__u": "b", "b_parametrizations_weight_0__v": "a"}
        check(model, ROW, {"a": 4, "b": 5}, **vectors, c_weight="3, b")

    @pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
    def test_computed_weights_cannot_be_copied(self):
        model = sandwich(lambda m, h: m.b(h.relu()), 4, b=nn.utils.weight_norm(Linear(4, 4)))
        with pytest.raises(InputError, match=r"cannot be copied to verify its spec.*torch.nn.utils.parametrizations"):
            PermutationSpec.from_model(model, ROW)


class TestOutputs:
    def test_buffers_that_are_written_are_none(self):
        def averaged(m, h):
            m.average.mul_(0.9).add_(h.mean(0))
            return h.relu()

        model = sandwich(averaged, 4)
        model.register_buffer("average", torch.zeros(4))
        check(model, ROW, {"a": 4}, average="a")

    def test_those_that_count(self):
        model = Net(lambda m, x: (lambda h: {"y": m.c(h), "hidden": h})(m.a(x).relu()), a=Linear(6, 4), c=Linear(4, 3))
        spec = check(model, ROW, {}, a_weight="4, 6")
        assert spec.frozen["a.bias", 0] == "it is one of several outputs; outputs= says which count"

        def counted(returned):
            return returned["y"]

        spec = PermutationSpec.from_model(model, ROW, outputs=counted)
        assert {name: group.size for name, group in spec.groups.items()} == {"a": 4}
        assert spec.frozen["c.bias", 0] == "it is an output"
        spec.verify(model, ROW, outputs=counted)
        with pytest.raises(InputError, match="permuting 'a' changes the outputs"):
            spec.verify(model, ROW)
        with pytest.raises(InputError, match="outputs= makes of what the model returns a NoneType without tensors"):
            PermutationSpec.from_model(model, ROW, outputs=lambda returned: None)


def test_channel_shuffle():
    model = Net(
        lambda m, x: m.c(functional.channel_shuffle(m.a(x).relu(), 2)), a=Conv2d(3, 6, 1), c=Conv2d(6, 4, 3, groups=2)
    )
    by_hand = Net(
        lambda m, x: m.c(m.a(x).relu().unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2)),
        a=Conv2d(3, 6, 1),
        c=Conv2d(6, 4, 3, groups=2),
    )
    spec, expected = (PermutationSpec.from_model(m, torch.rand(2, 3, 4, 5)) for m in (model, by_hand))
    assert spec.axes == expected.axes
    model.c = Conv2d(6, 4, 3)
    check(model, torch.rand(2, 3, 4, 5), {"a": 2, "a.2": 3}, a_bias="a*a.2", c_weight="4, a.2*a, 3, 3")


@pytest.mark.parametrize(
    ("function", "after", "reason"),
    [
        (lambda m, h: h[:, ::2], 4, "a slice with a step takes some of its positions"),
        (lambda m, h: h[:, [2, 0, 1]], 3, "it is indexed by data"),
        (lambda m, h: h.flip(1), 8, "aten.flip tells its positions apart"),
        (lambda m, h: h.roll(1, 1), 8, "aten.roll tells its positions apart"),
        (lambda m, h: functional.pad(h, (0, 2)), 10, "aten.pad tells its positions apart"),
        (lambda m, h: h.cumsum(1), 8, "aten.cumsum tells its positions by number"),
        (lambda m, h: h * h.argmin(), 8, "aten.argmin tells its positions by number"),
        (lambda m, h: h.topk(2, 1).values, 2, "aten.topk tells its positions by number"),
        (lambda m, h: h * torch.arange(8.0), 8, "it meets a constant"),
        (lambda m, h: torch.fft.fft(h).abs(), 8, "no rule for aten.fft_fft"),
        (lambda m, h: functional.max_pool1d(h[None], 2)[0], 4, "places are pooled or resampled"),
    ],
)
def test_what_tells_units_apart_keeps_them(function, after, reason):
    spec = check(sandwich(function, 8, after=after), ROW, {}, a_weight="8, 6", a_bias="8", c_weight=f"3, {after}")
    assert spec.frozen["a.bias", 0] == reason


def test_operator_of_a_library_without_a_rule():
    spec = check(sandwich(lambda m, h: m.r(h[:, None])[0][:, 0], 8, after=4, r=nn.GRU(8, 4, batch_first=True)), ROW, {})
    assert spec.frozen["r.weight_hh_l0", 1] == spec.frozen["a.bias", 0] == "no rule for aten.gru"
    assert "no rule for aten.gru" in str(spec)


def test_constants_do_not_bind_units():
    """Adding zeros, scaling by a number, masks of one value: all units stay free."""
    model = sandwich(lambda m, h: torch.where(h > 0, h * 2 + torch.zeros(4), torch.full_like(h, 0.5)), 4)
    check(model, ROW, {"a": 4}, c_weight="3, a")


@pytest.mark.parametrize(
    "context",
    [lambda: torch.autocast("cpu", enabled=False), torch.enable_grad, torch.no_grad],
    ids=["autocast", "on", "off"],
)
def test_contexts_are_looked_into(context):
    """What runs under autocast or another gradient mode is traced like all else."""

    def within(m, h):
        with context():
            return m.b(h).relu()

    check(sandwich(within, 4, b=Linear(4, 4)), ROW, {"a": 4, "b": 4}, b_weight="b, a", c_weight="3, b")
