"""The kernels against transformers and plain torch; the same bits on every path and in every batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from gateway import kernels
from gateway.kernels import bench, build

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no C++ compiler")

BLOCK = 24
"""Slots of a cache block in these tests: no power of two, no multiple of 16."""


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Whatever the machine and the other tests chose: the kernels part their work."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_path() -> Iterator[None]:
    yield
    kernels.use_path(kernels.paths()[0])


def fake_quantized(x: Tensor) -> Tensor:
    """x rounded to 127 steps a side in groups of 128 along the last axis."""
    padded = nn.functional.pad(x, (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    scale = padded.abs().amax(-1, keepdim=True) / 127
    rounded = torch.where(scale > 0, (padded / scale).round() * scale, 0.0)
    return rounded.flatten(-2)[..., : x.shape[-1]]


class QuantizedLinear(nn.Module):
    """What the kernels compute, in torch."""

    def __init__(self, linear: nn.Linear, bits: kernels.Bits) -> None:
        super().__init__()
        packed = kernels.quantize_weight(linear.weight, bits)
        self.weight = nn.Parameter(kernels.dequantize_weight(packed))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(fake_quantized(x), self.weight, self.bias)


COMMON: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 160,
    "intermediate_size": 272,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (transformers.Qwen2Config, {"head_dim": 40, "hidden_size": 160}),
    "qwen3": (transformers.Qwen3Config, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "gemma": (transformers.GemmaConfig, {"num_key_value_heads": 1, "head_dim": 256}),
}


def reference(family: str, bits: kernels.Bits = 8) -> Any:
    """A small random model of the family, its linear layers replaced by QuantizedLinear."""
    config_class, changes = FAMILIES[family]
    sizes = COMMON | changes
    if family == "qwen2":  # its head size is hidden / heads
        sizes |= {"hidden_size": 192, "head_dim": 48}
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**sizes)).eval()
    for parameter in model.parameters():  # norms and biases too, so that a forgotten one shows
        parameter.normal_(mean=1.0 if parameter.dim() == 1 else 0.0, std=0.1)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, QuantizedLinear(child, bits))
    return model


def decoder_of(model: Any, bits: kernels.Bits = 8) -> kernels.Decoder:
    """The kernels' decoder with the weights of a reference model, quantized again."""
    config, inner = model.config, model.model
    gemma = config.model_type == "gemma"

    def norm(module: Any) -> Tensor:
        return (module.weight + (1.0 if gemma else 0.0)).detach()

    def packed(*linears: Any) -> kernels.Packed:
        return kernels.quantize_weight(torch.cat([linear.weight for linear in linears]), bits)

    def layer(one: Any) -> kernels.LayerWeights:
        attention, mlp = one.self_attn, one.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        return kernels.LayerWeights(
            input_norm=norm(one.input_layernorm),
            post_norm=norm(one.post_attention_layernorm),
            qkv=packed(*qkv),
            qkv_bias=torch.cat([p.bias for p in qkv]) if qkv[0].bias is not None else None,
            o=packed(attention.o_proj),
            gate_up=packed(mlp.gate_proj, mlp.up_proj),
            down=packed(mlp.down_proj),
            q_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
            k_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        )

    head_dim = inner.layers[0].self_attn.head_dim
    shape = kernels.DecoderShape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        attention_scale=head_dim**-0.5,
        activation="gelu_tanh" if gemma else "silu",
        embed_scale=config.hidden_size**0.5 if gemma else 1.0,
    )
    positions = torch.arange(config.max_position_embeddings)[None]
    cos, sin = inner.rotary_emb(torch.zeros(1), positions)
    half = head_dim // 2
    return kernels.Decoder(
        shape,
        embed=inner.embed_tokens.weight.detach(),
        cos=cos[0, :, :half].contiguous(),
        sin=sin[0, :, :half].contiguous(),
        final_norm=norm(inner.norm),
        head=packed(model.lm_head),
        layers=[layer(one) for one in inner.layers],
    )


@dataclass(slots=True)
class Slots:
    """Caches and a block table whose blocks are out of order."""

    k: list[Tensor]
    v: list[Tensor]
    table: Tensor

    @classmethod
    def of(cls, model: Any, rows: int, blocks: int, dtype: torch.dtype = torch.float32) -> Slots:
        config = model.config
        head_dim = model.model.layers[0].self_attn.head_dim
        shape = (rows * blocks, config.num_key_value_heads, BLOCK, head_dim)
        k, v = ([torch.full(shape, 9.0, dtype=dtype) for _ in model.model.layers] for _ in range(2))
        order = torch.randperm(rows * blocks, generator=torch.Generator().manual_seed(1))
        return cls(k, v, order.view(rows, blocks))


def run(decoder: kernels.Decoder, slots: Slots, fed: list[tuple[int, int, int]], wanted: list[int]) -> Tensor:
    """Feeds (row, position, token) triples; the logits of the wanted ones."""
    rows, positions, tokens = (torch.tensor(column) for column in zip(*fed, strict=True))
    logits, _, _ = decoder.forward(
        tokens, positions, rows, slots.table, slots.k, slots.v, torch.tensor(wanted)
    )
    return logits.clone()


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(200, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_packing_loses_at_most_half_a_step() -> None:
    weight = torch.randn(70, 272)
    packed = kernels.quantize_weight(weight)
    scale = nn.functional.pad(weight, (0, 112)).view(70, 3, 128).abs().amax(-1) / 127
    error = nn.functional.pad(kernels.dequantize_weight(packed) - weight, (0, 112)).view(70, 3, 128)
    # A bfloat16 scale is off by up to 1 in 256, which moves (or clips) the top value by half a step more.
    assert bool((error.abs() <= 1.01 * scale[..., None]).all())
    assert (error.pow(2).mean() / scale.pow(2).mean()).sqrt() < 0.32  # uniform rounding: 12 ** -0.5 = 0.289


LEVELS = (-112, -83, -63, -47, -33, -20, -9, 0, 8, 17, 28, 40, 54, 71, 93, 127)
"""What a 4-bit code stands for, in units of its group's scale."""


def nearest_levels(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [n, groups, 128] at the nearest levels of scale [n, groups, 1]."""
    levels = torch.tensor(LEVELS) * scale[..., None]
    chosen = (weight[..., None] - levels).abs().argmin(-1, keepdim=True)
    return levels.expand(*weight.shape, 16).gather(-1, chosen)[..., 0]


def test_four_bits_hold_what_lies_on_the_levels() -> None:
    levels = torch.tensor(LEVELS)[torch.randint(16, (40, 3, 128))]
    levels[..., 5] = 127  # the largest of each group, whose sign is the scale's
    scale = torch.randn(40, 3, 1).bfloat16().float()
    weight = (levels * scale).flatten(1)
    packed = kernels.quantize_weight(weight, 4)
    assert packed.bits == 4
    assert packed.weight.numel() * 2 == kernels.quantize_weight(weight).weight.numel()
    assert torch.equal(kernels.dequantize_weight(packed), weight)
    assert torch.equal(
        kernels.dequantize_weight(kernels.quantize_weight(weight[:, :272], 4)), weight[:, :272]
    )


def test_four_bits_take_the_nearest_level_of_the_best_scale() -> None:
    weight = torch.randn(70, 256)
    groups = weight.view(70, 2, 128)
    got = kernels.dequantize_weight(kernels.quantize_weight(weight, 4)).view(70, 2, 128)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    tried = [
        nearest_levels(groups, (largest / 127 * top).bfloat16().float())
        for top in (0.76, 0.82, 0.88, 0.94, 1.0, 1.06)
    ]
    errors = torch.stack([(one - groups).pow(2).sum(-1) for one in tried])
    torch.testing.assert_close((got - groups).pow(2).sum(-1), errors.amin(0), rtol=1e-4, atol=0.0)
    assert (got - groups).pow(
        2
    ).mean() < 0.009  # sixteen levels of a normal variable, at best: 0.0095 at one scale


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (100, 272), (7, 16)])
def test_linear_is_the_product_of_quantized_sides(
    n: int, k: int, dtype: torch.dtype, bits: kernels.Bits
) -> None:
    torch.manual_seed(n)
    weight, x, bias = torch.randn(n, k).to(dtype), torch.randn(3, 5, k), torch.randn(n)
    packed = kernels.quantize_weight(weight, bits)
    assert (packed.n, packed.bits) == (n, bits)
    expected = fake_quantized(x).double() @ kernels.dequantize_weight(packed).double().T + bias
    torch.testing.assert_close(kernels.int8_linear(x, packed, bias).double(), expected, rtol=1e-5, atol=1e-4)
    exact = x @ weight.float().T
    assert (kernels.int8_linear(x, packed) - exact).norm() < {8: 0.02, 4: 0.12}[bits] * exact.norm()


def test_a_row_of_zeros_gives_the_bias() -> None:
    packed = kernels.quantize_weight(torch.randn(64, 128))
    bias = torch.randn(64)
    assert torch.equal(kernels.int8_linear(torch.zeros(1, 128), packed, bias)[0], bias)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 63, 64, 65, 130])
def test_every_path_gives_the_same_bits(rows: int, bits: kernels.Bits) -> None:
    torch.manual_seed(rows)
    packed = kernels.quantize_weight(torch.randn(150, 400), bits)
    x, bias = torch.randn(rows, 400) * torch.logspace(-3, 3, rows)[:, None], torch.randn(150)
    expected = kernels.int8_linear(x, packed, bias)
    for path in kernels.paths()[1:]:
        kernels.use_path(path)
        assert torch.equal(kernels.int8_linear(x, packed, bias), expected), path


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_does_not_depend_on_its_neighbours(bits: kernels.Bits) -> None:
    torch.manual_seed(3)
    packed = kernels.quantize_weight(torch.randn(96, 384), bits)
    x = torch.randn(64, 384)
    alone = torch.cat([kernels.int8_linear(x[i : i + 1], packed) for i in range(64)])
    for rows in range(2, 65):
        chosen = torch.randperm(64)[:rows]
        assert torch.equal(kernels.int8_linear(x[chosen], packed), alone[chosen])


@pytest.mark.parametrize("path", ["amx", "vnni", "avx2", "portable"])
@pytest.mark.parametrize(("family", "bits"), [*((name, 8) for name in FAMILIES), ("qwen2", 4)])
def test_decoder_gives_the_logits_of_transformers(family: str, bits: kernels.Bits, path: str) -> None:
    if path not in kernels.paths():
        pytest.skip(f"this processor has no {path}")
    kernels.use_path(path)
    model = reference(family, bits)
    tokens = prompt(30)
    expected = model(torch.tensor([tokens])).logits[0]
    fed = [(1, i, token) for i, token in enumerate(tokens)]
    logits = run(decoder_of(model, bits), Slots.of(model, rows=3, blocks=3), fed, list(range(30)))
    # Float noise of 1e-6 moves a few activations over a rounding edge, which is a step of 1/127 there;
    # tokens with no activation near an edge agree to float accuracy.
    assert (logits - expected).norm() < 0.01 * expected.norm()
    assert (logits - expected)[1:].abs().amax(-1).min() < 1e-4


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 8), (torch.bfloat16, 8), (torch.bfloat16, 4)])
def test_decode_equals_prefill_among_neighbours_and_on_every_path(
    dtype: torch.dtype, bits: kernels.Bits
) -> None:
    model = reference("qwen3", bits)
    decoder = decoder_of(model, bits)
    prompts = [prompt(length, seed) for seed, length in enumerate((37, 1, 20, 50))]
    alone = []
    for row, tokens in enumerate(prompts):
        fed = [(row, i, token) for i, token in enumerate(tokens)]
        alone.append(run(decoder, Slots.of(model, 4, 3, dtype), fed, list(range(len(tokens)))))
    for path in kernels.paths():
        kernels.use_path(path)
        slots = Slots.of(model, 4, 3, dtype)
        for step in range(50):  # ragged: a token or two of each row, in an order that changes
            fed, expected = [], []
            for row in sorted(range(4), key=lambda r: (r * 7 + step) % 4):
                width = 2 if row == 3 else 1
                for i in range(step * width, min((step + 1) * width, len(prompts[row]))):
                    fed.append((row, i, prompts[row][i]))
                    expected.append(alone[row][i])
            if fed:
                assert torch.equal(run(decoder, slots, fed, list(range(len(fed)))), torch.stack(expected)), (
                    path
                )


def test_rollback_then_decode_equals_a_fresh_prefill() -> None:
    model = reference("llama")
    decoder = decoder_of(model)
    slots = Slots.of(model, 1, 2)
    fed = [(0, i, token) for i, token in enumerate(prompt(20))]
    run(decoder, slots, fed, [19])
    other = [(0, i, token) for i, token in enumerate(prompt(12, seed=9), start=10)]
    again = run(decoder, slots, other, [11])
    assert torch.equal(again, run(decoder, Slots.of(model, 1, 2), fed[:10] + other, [21]))


def test_logits_of_an_earlier_pass_stay_as_they_were() -> None:
    model = reference("llama")
    decoder = decoder_of(model)
    slots = Slots.of(model, 2, 1)
    indices = torch.tensor([0])
    first, *_ = decoder.forward(indices, indices, indices, slots.table, slots.k, slots.v, indices)
    kept = first.clone()
    decoder.forward(indices + 3, indices, indices, slots.table, slots.k, slots.v, indices)
    assert torch.equal(first, kept)


def test_attention_entropy_and_hidden_state_are_those_of_the_last_layer() -> None:
    model = reference("llama")
    model.set_attn_implementation("eager")
    tokens = torch.tensor(prompt(9))
    said = model(tokens[None], output_attentions=True, output_hidden_states=True)
    weights = said.attentions[-1][0]  # heads, query, key
    expected = torch.special.entr(weights).sum(-1).mean(0)
    slots = Slots.of(model, 1, 1)
    positions = torch.arange(9)
    _, entropy, hidden = decoder_of(model).forward(
        tokens, positions, torch.zeros_like(positions), slots.table, slots.k, slots.v, positions
    )
    torch.testing.assert_close(entropy, expected, rtol=1e-2, atol=1e-3)
    difference = (hidden - said.hidden_states[-1][0]).norm(dim=-1)
    assert (difference < 0.03 * said.hidden_states[-1][0].norm(dim=-1)).all()


def test_attention_matches_torch() -> None:
    torch.manual_seed(0)
    heads, kv_heads, d, length = 6, 2, 32, 45
    q, k, v = torch.randn(length, heads, d), *torch.randn(2, kv_heads, length, d)
    table = torch.tensor([[2, 0]])
    caches = torch.zeros(2, 3, kv_heads, BLOCK, d)
    for cache, source in zip(caches, (k, v), strict=True):
        cache[2], cache[0, :, : length - BLOCK] = source[:, :BLOCK], source[:, BLOCK:]
    positions = torch.arange(length)
    out = kernels.attention(q, caches[0], caches[1], torch.zeros_like(positions), positions, table, 0.2)
    expected = nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.repeat_interleave(3, 0), v.repeat_interleave(3, 0), is_causal=True, scale=0.2
    )
    torch.testing.assert_close(out, expected.transpose(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 200}, r"tokens\[0\] = 200 is outside 0..199"),
        ({"positions": 24}, r"positions\[0\] = 24 is outside 0..23"),
        ({"rows": 1}, r"rows\[0\] = 1 is outside 0..0"),
        ({"wanted": 1}, r"wanted\[0\] = 1 is outside 0..0"),
        ({"tokens": -1}, r"tokens\[0\] = -1"),
    ],
)
def test_an_index_out_of_range_is_named(change: dict[str, int], message: str) -> None:
    model = reference("llama")
    slots = Slots.of(model, 1, 1)
    given = {name: torch.tensor([change.get(name, 0)]) for name in ("tokens", "positions", "rows", "wanted")}
    with pytest.raises(RuntimeError, match=message):
        decoder_of(model).forward(
            given["tokens"], given["positions"], given["rows"], slots.table, slots.k, slots.v, given["wanted"]
        )


def test_shapes_that_do_not_fit_are_refused() -> None:
    packed = kernels.quantize_weight(torch.randn(64, 128))
    with pytest.raises(RuntimeError, match="not a packed weight"):
        torch.ops.tokentape.int8_linear(torch.randn(1, 256), packed.weight, packed.scale, torch.empty(0), 64)
    with pytest.raises(RuntimeError, match="8 or 4 bits, not 2"):
        torch.ops.tokentape.quantize_weight(torch.randn(64, 128), 2)
    with pytest.raises(RuntimeError, match="no kernel path"):
        kernels.use_path("abacus")
    assert not kernels.DecoderShape(100, 64, 4, 2, 16, 1e-6, 1.0).supported


def test_without_a_compiler_the_kernels_are_unavailable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert build.load.__wrapped__() == ""
    assert "kernels_unavailable" in capsys.readouterr().out


def test_a_failed_build_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_commands", lambda cxx, out: ([[cxx, "--no-such-flag"]], ["true"]))
    with pytest.raises(build.BuildError, match="no-such-flag"):
        build.build()
    assert list((tmp_path / "kernels").iterdir()) == []


def test_of_two_that_want_the_kernels_one_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path / "cache"))
    told = tmp_path / "told"

    def commands(cxx: str, out: Path) -> tuple[list[list[str]], list[str]]:
        return [["sh", "-c", f"echo compiled >> {told}; sleep 0.2"]], ["touch", f"{out}/kernels.so"]

    monkeypatch.setattr(build, "_key", lambda cxx: "key")
    monkeypatch.setattr(build, "_commands", commands)
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda _: build.build(), range(2))
    assert first == second
    assert first.exists()
    assert told.read_text() == "compiled\n"


def test_bench_times_a_decoder_of_the_given_shape() -> None:
    loaded = bench.random_decoder(bench.Sizes(2, 64, 96, 4, 2, 16, vocab=300))
    ms = bench.best_ms({"one": lambda: loaded.step(1), "many": lambda: loaded.step(64)}, repeats=2)
    assert 0 < ms["one"] < 1000
    assert loaded.num_bytes > 0
