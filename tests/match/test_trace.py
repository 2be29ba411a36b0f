"""Specs by tracing, for whole models: what moves together, how many groups there are, and that all leave the function.

``PermutationSpec.from_model`` permutes every group at random and warns of those that change the outputs; warnings are
errors in these tests. Each spec is then verified on inputs of another size than it was traced on. Architectures are
small here where their code allows; the published sizes are marked slow.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import MBConvConfig
from torchvision.models.vgg import make_layers

from isthmus.match import PermutationSpec, apply_permutation, random_permutation
from isthmus.match.spec import Axis

IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LARGER = torch.rand(3, 3, 48, 40, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(0))
LONGER = torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(1))
VGG16 = [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"]


def sizes(spec: PermutationSpec) -> dict[str, object]:
    return {group.name: (group.size, group.within) if group.within else group.size for group in spec.groups.values()}


def written(axis: Axis) -> str:
    return " + ".join("*".join(group or str(size) for size, group in segment) for segment in axis)


def vgg16(batch_norm: bool, divisor: int = 16) -> nn.Module:
    """The layers of VGG-16 with fewer channels."""
    layout = [width if width == "M" else width // divisor for width in VGG16]
    model = models.VGG(make_layers(layout, batch_norm=batch_norm), num_classes=5, init_weights=False)
    wide = 512 // divisor * 49
    model.classifier = nn.Sequential(nn.Linear(wide, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))
    return model


def gpt2(**options: object) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, **small, **options))


def llama(**options: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=50, num_key_value_heads=2, tie_word_embeddings=True, **small, **options)
    )


def traced(model: nn.Module, inputs: object, others: object) -> PermutationSpec:
    """The spec of a model, which holds on other inputs, too."""
    spec = PermutationSpec.from_model(model, inputs)
    spec.verify(model, others)
    return spec


def bottlenecks(width: int = 64, groups: int = 1) -> nn.Module:
    """A stem, and two stages of ResNet bottlenecks on narrow streams."""

    def block(fan_in: int, planes: int, stride: int = 1) -> nn.Module:
        other = stride > 1 or fan_in != 4 * planes
        beside = nn.Sequential(nn.Conv2d(fan_in, 4 * planes, 1, stride), nn.BatchNorm2d(4 * planes)) if other else None
        return models.resnet.Bottleneck(fan_in, planes, stride, beside, groups=groups, base_width=width)

    stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    stages = nn.Sequential(block(8, 4), block(16, 4)), nn.Sequential(block(16, 8, 2))
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))


def test_mlp():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
    spec = PermutationSpec.from_model(model, torch.zeros(2, 8))
    assert sizes(spec) == {"0": 16, "2": 12}
    output = "it is an output"
    assert spec.frozen == {("0.weight", 1): "it meets an input", ("4.weight", 0): output, ("4.bias", 0): output}
    assert str(spec).splitlines() == [
        "group  units  axes",
        "0      16     0.weight[0], 0.bias[0], 2.weight[1]",
        "2      12     2.weight[0], 2.bias[0], 4.weight[1]",
        "stays: 0.weight[1]: it meets an input",
        "stays: 4.weight[0], 4.bias[0]: it is an output",
    ]


@pytest.mark.parametrize("batch_norm", [False, True])
def test_vgg16(batch_norm):
    spec = traced(vgg16(batch_norm), IMAGES, LARGER)
    assert len(spec.groups) == 13 + 2
    last = list(spec.groups)[12]
    assert written(spec.axes["classifier.0.weight"][1]) == f"{last}*49"
    assert ("features.1.running_var" in spec.statistics) == batch_norm


def test_resnet18():
    spec = traced(models.resnet18(num_classes=5), IMAGES, LARGER)
    streams = {"conv1": 64, "layer2.0.conv2": 128, "layer3.0.conv2": 256, "layer4.0.conv2": 512}
    inner = {f"layer{stage}.{block}.conv1": 32 * 2**stage for stage in range(1, 5) for block in range(2)}
    assert sizes(spec) == streams | inner
    stream = spec.axes["conv1.weight"][0]
    for key in ("bn1.bias", "layer1.0.conv2.weight", "layer1.1.bn2.running_mean", "layer1.1.conv2.weight"):
        assert spec.axes[key][0] == stream
    for key in ("layer1.0.conv1.weight", "layer2.0.conv1.weight", "layer2.0.downsample.0.weight"):
        assert spec.axes[key][1] == stream
    assert "bn1.running_mean" in spec.statistics


def test_bottlenecks_and_wide_ones():
    plain, wide = (traced(bottlenecks(width), IMAGES, LARGER) for width in (64, 128))
    assert len(plain.groups) == len(wide.groups) == 1 + 2 + 2 * 3  # the stem, a stream in each stage, two in each block
    assert plain.groups["1.0.conv3"].size == wide.groups["1.0.conv3"].size == 16
    assert wide.groups["1.0.conv2"].size == 2 * plain.groups["1.0.conv2"].size == 8


def test_resnext_blocks():
    spec = traced(bottlenecks(groups=4), IMAGES, LARGER)
    assert written(spec.axes["1.0.conv2.weight"][0]) == "1.0.conv1.blocks*1.0.conv2.units"
    assert written(spec.axes["1.0.conv2.weight"][1]) == "1.0.conv1"
    assert spec.groups["1.0.conv2.units"].within == "1.0.conv1.blocks"


def test_densenet():
    spec = traced(models.DenseNet(8, (2, 2), 16, num_classes=5), IMAGES, LARGER)
    assert len(spec.groups) == 1 + 2 * 4 + 1  # the stem, two in each layer, the transition
    assert written(spec.axes["features.transition1.conv.weight"][1]) == (
        "features.conv0 + features.denseblock1.denselayer1.conv2 + features.denseblock1.denselayer2.conv2"
    )
    assert spec.axes["classifier.weight"][1] == spec.axes["features.norm5.running_var"][0]


def test_mobilenet_v2():
    model = models.MobileNetV2(5, inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2]], dropout=0.0)
    spec = traced(model, IMAGES, LARGER)
    assert sizes(spec) == {
        "features.0.0": 32, "features.1.conv.1": 16, "features.2.conv.0.0": 96, "features.2.conv.2": 24,
        "features.3.conv.0.0": 144, "features.4.0": 1280,
    }  # fmt: skip
    depthwise = spec.axes["features.3.conv.1.0.weight"]
    assert list(map(written, depthwise)) == ["features.3.conv.0.0", "1", "3", "3"]


def test_efficientnet():
    setting = [MBConvConfig(1, 3, 1, 32, 16, 1), MBConvConfig(6, 3, 2, 16, 24, 2)]
    spec = traced(models.EfficientNet(setting, 0.0, num_classes=5), IMAGES, LARGER)
    assert len(spec.groups) == 9  # stem and depthwise are one; streams 2, expansions 2, squeezes 3, head 1
    excited = spec.axes["features.2.1.block.2.fc2.weight"]  # squeeze and excitation scale the expanded channels
    assert excited[0] == spec.axes["features.2.1.block.0.0.weight"][0]


def test_convnext():
    model = models.ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 1)], num_classes=5)
    spec = traced(model, IMAGES, LARGER)
    assert sorted(group.size for group in spec.groups.values()) == [16, 32, 64, 64, 128]
    assert written(spec.axes["features.1.0.layer_scale"][0]) == "features.0.0"


def test_vit():
    model = models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=5)
    nn.init.normal_(model.heads.head.weight)
    spec = PermutationSpec.from_model(model, IMAGES)
    expected: dict[str, object] = {"conv_proj": 32}
    for layer in ("encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"):
        heads = f"{layer}.self_attention.heads"
        expected |= {heads: 4, f"{layer}.mlp.0": 64}
        expected |= {f"{layer}.self_attention.{name}": (8, heads) for name in ("query_key", "value")}
    assert sizes(spec) == expected
    assert written(spec.axes["class_token"][2]) == written(spec.axes["encoder.pos_embedding"][2]) == "conv_proj"
    attention = "encoder.layers.encoder_layer_1.self_attention."
    fused = written(spec.axes[attention + "in_proj_weight"][0]).replace(attention, "")
    assert fused == "heads*query_key + heads*query_key + heads*value"


def test_swin():
    model = models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=5)
    spec = traced(model, IMAGES, LARGER)  # which are padded to whole windows
    assert len(spec.groups) == 2 + 4 * 4  # a stream in each stage; heads, two kinds of columns and an MLP in each block
    merged = spec.axes["features.2.norm.weight"][0]
    assert written(merged) == " + ".join(["features.0.0"] * 4)  # four neighbours side by side
    table = "features.1.0.attn.relative_position_bias_table"
    assert written(spec.axes[table][1]) == "features.1.0.attn.heads"
    assert spec.frozen[table, 0] == "it is indexed by data"


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder(norm_first):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(7, 32), encoder, nn.Linear(32, 3))
    spec = traced(model, torch.rand(2, 5, 7), torch.rand(3, 9, 7))
    expected: dict[str, object] = {"0": 32}
    for at in ("1.layers.0", "1.layers.1"):
        expected |= {f"{at}.self_attn.heads": 4, f"{at}.linear1": 64}
        expected |= {f"{at}.self_attn.{name}": (8, f"{at}.self_attn.heads") for name in ("query_key", "value")}
    assert sizes(spec) == expected


def test_transformer_with_cross_attention():
    model = nn.Transformer(16, 2, 1, 1, 24, batch_first=True)
    inputs, others = ((torch.rand(2, n, 16), torch.rand(2, n - 1, 16)) for n in (5, 9))
    spec = traced(model, inputs, others)
    assert len(spec.groups) == 3 * 3 + 2  # three attentions, two MLPs; the stream is input and output
    assert written(spec.axes["decoder.layers.0.multihead_attn.out_proj.weight"][0]) == "16"


def test_gpt2():
    spec = traced(gpt2(), {"input_ids": TOKENS}, {"input_ids": LONGER})
    expected: dict[str, object] = {"transformer.wte": 32}
    for at in ("transformer.h.0", "transformer.h.1"):
        expected |= {f"{at}.attn.heads": 4, f"{at}.mlp.c_fc": 128}
        expected |= {f"{at}.attn.{name}": (8, f"{at}.attn.heads") for name in ("query_key", "value")}
    assert sizes(spec) == expected
    assert spec.axes["lm_head.weight"] == spec.axes["transformer.wte.weight"]
    assert spec.ties == (frozenset({"lm_head.weight", "transformer.wte.weight"}),)
    assert spec.frozen["lm_head.weight", 0] == "its rows are looked up by index"
    fused = written(spec.axes["transformer.h.0.attn.c_attn.weight"][1]).replace("transformer.h.0.attn.", "")
    assert fused == "heads*query_key + heads*query_key + heads*value"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama(attention):
    """Rotary embeddings keep query and key columns; query heads move with those whose keys and values they share."""
    model = llama(attn_implementation=attention)
    spec = traced(model, {"input_ids": TOKENS}, {"input_ids": LONGER})
    expected: dict[str, object] = {"model.embed_tokens": 32}
    for at in ("model.layers.0", "model.layers.1"):
        heads = f"{at}.self_attn.heads"
        expected |= {heads: 2, f"{at}.self_attn.queries": (2, heads), f"{at}.self_attn.value": (8, heads)}
        expected |= {f"{at}.mlp.gate_proj": 48}
    assert sizes(spec) == expected
    at = "model.layers.1.self_attn."
    found = {name: written(spec.axes[f"{at}{name}_proj.weight"][name == "o"]).replace(at, "") for name in "qkvo"}
    assert found == {"q": "heads*queries*8", "k": "heads*8", "v": "heads*value", "o": "heads*queries*value"}
    assert "inv_freq" in spec.frozen[f"{at}k_proj.weight", 0]


def test_permuted_models_compute_the_same_in_float32():
    model = llama().eval()
    spec = PermutationSpec.from_model(model, {"input_ids": TOKENS})
    twin = apply_permutation(spec, random_permutation(spec, torch.Generator().manual_seed(1)), model)
    with torch.no_grad():
        torch.testing.assert_close(twin(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-6)
    assert not torch.equal(twin.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("vgg16", 15),
        ("vgg16_bn", 15),
        ("resnet50", 37),
        ("wide_resnet50_2", 37),
        ("densenet121", 120),
        ("mobilenet_v2", 25),
        ("efficientnet_b0", 40),
        ("convnext_tiny", 22),
        ("swin_t", 52),
        ("shufflenet_v2_x0_5", 30),
        ("resnext50_32x4d", 53),
    ],
)
def test_published_sizes(name, groups):
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert len(PermutationSpec.from_model(getattr(models, name)(), images).groups) == groups


@pytest.mark.slow
def test_vit_b_16():
    model = models.vit_b_16()
    nn.init.normal_(model.heads.head.weight)
    assert len(PermutationSpec.from_model(model, torch.rand(1, 3, 224, 224)).groups) == 1 + 12 * 4
