"""Public models as data: the dimensions in their configurations that determine call shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Linear:
    """A linear layer: (tokens, inputs) times (inputs, outputs).

    activation: in the epilogue, or None.
    """

    outputs: int
    inputs: int
    bias: bool = False
    activation: str | None = None


@dataclass(frozen=True)
class Model:
    """The shape-related part of a model's configuration.

    suite: its name in `bench --suite`; blocks of several widths share one.
    intermediate: width of the feed-forward network, or of each expert; 0: none.
    gate: activation of a gated network (silu, gelu, gelu_tanh, clamped_silu); None: not gated.
    vocab: 0: the model has no head.  norms: (rows per token, width) of norms besides those of width
        `hidden`.
    linears: layers besides qkv, o, the feed-forward network and the head.  plain_attention: qkv and
        o have their usual shape; otherwise they are in `linears`.
    experts, experts_per_token: of the router.  shared: width of the network that runs beside the
        routed experts.
    window: keys per query in sliding-window layers; 0: no such layers.  only_windows: all layers
        have a window.
    sequences: lengths attended without a causal mask, for images for example; (): causal prefill.
    caches: numbers of keys that a new token attends to; (): the model does not decode.
    """

    suite: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gate: str | None = "silu"
    activation: str | None = None
    norm: str = "rms_norm"
    norms: tuple[tuple[int, int], ...] = ()
    qkv_bias: bool = False
    bias: bool = False
    linears: tuple[Linear, ...] = ()
    plain_attention: bool = True
    value_dim: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    shared: int = 0
    window: int = 0
    only_windows: bool = False
    sequences: tuple[int, ...] = ()
    caches: tuple[int, ...] = (512, 2048, 8192, 32768, 131072)
    dtype: str = "bfloat16"


def _qwen25(
    size: str, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> Model:
    """Qwen/Qwen2.5-*: config.json.  Only qkv has a bias."""
    return Model(
        f"qwen2.5-{size}", hidden, intermediate, heads, kv_heads, head_dim, vocab, qkv_bias=True
    )


def _gpt_oss(size: str, experts: int) -> Model:
    """openai/gpt-oss-*: config.json.  The gate is clamped and scaled, unlike dual_gemm_silu's."""
    return Model(
        f"gpt-oss-{size}", 2880, 2880, 64, 8, 64, 201088, gate="clamped_silu", bias=True,
        qkv_bias=True, experts=experts, experts_per_token=4, window=128,
    )  # fmt: skip


def _sdxl(hidden: int, heads: int, tokens: int) -> Model:
    """stabilityai/stable-diffusion-xl-base-1.0: unet/config.json, images of 1024 x 1024.

    A transformer block of one width: GEGLU, and the queries of cross-attention.
    """
    return Model(
        "sdxl", hidden, 4 * hidden, heads, heads, 64, 0, gate="gelu", norm="layer_norm", bias=True,
        linears=(Linear(hidden, hidden),), sequences=(tokens,), caches=(),
        dtype="float16",
    )  # fmt: skip


MODELS = (
    # meta-llama/Meta-Llama-3-*: config.json.
    Model("llama3-8b", 4096, 14336, 32, 8, 128, 128256),
    Model("llama3-70b", 8192, 28672, 64, 8, 128, 128256),
    _qwen25("0.5b", 896, 4864, 14, 2, 64, 151936),
    _qwen25("1.5b", 1536, 8960, 12, 2, 128, 151936),
    _qwen25("3b", 2048, 11008, 16, 2, 128, 151936),
    _qwen25("7b", 3584, 18944, 28, 4, 128, 152064),
    _qwen25("14b", 5120, 13824, 40, 8, 128, 152064),
    _qwen25("32b", 5120, 27648, 40, 8, 128, 152064),
    _qwen25("72b", 8192, 29568, 64, 8, 128, 152064),
    # Qwen/Qwen3-*: config.json.  q and k are normalised per head.
    Model("qwen3-8b", 4096, 12288, 32, 8, 128, 151936, norms=((32, 128), (8, 128))),
    Model(
        "qwen3-30b-a3b", 2048, 768, 32, 4, 128, 151936, norms=((32, 128), (4, 128)),
        experts=128, experts_per_token=8,
    ),
    # mistralai/Mistral-7B-v0.1: config.json.
    Model("mistral-7b", 4096, 14336, 32, 8, 128, 32000, window=4096, only_windows=True),
    # google/gemma-2-9b, google/gemma-3-12b-pt (its text model): config.json.
    Model("gemma2-9b", 3584, 14336, 16, 8, 256, 256000, gate="gelu_tanh", window=4096),
    Model(
        "gemma3-12b", 3840, 15360, 16, 8, 256, 262208, gate="gelu_tanh", window=1024,
        norms=((16, 256), (8, 256)),
    ),
    # microsoft/Phi-3-mini-4k-instruct, microsoft/phi-4: config.json.
    Model("phi3-mini", 3072, 8192, 32, 32, 96, 32064, window=2047, only_windows=True),
    Model("phi4", 5120, 17920, 40, 10, 128, 100352, caches=(512, 2048, 8192, 16384)),
    # deepseek-ai/DeepSeek-V3: config.json.  MLA: q has rank 1536, k and v have rank 512, plus 64
    # for positions; 128 heads of 128 + 64 for q k^T and of 128 for v.  Its latent cache (576) is
    # wider than decode_attention's heads.
    Model(
        "deepseek-v3", 7168, 2048, 128, 128, 192, 129280, norms=((1, 1536), (1, 512)),
        linears=(
            *(Linear(1536, 7168), Linear(24576, 1536), Linear(576, 7168), Linear(32768, 512)),
            Linear(7168, 16384),
            *(Linear(36864, 7168), Linear(7168, 18432)),  # the first layers' dense network
        ),
        plain_attention=False, value_dim=128, experts=256, experts_per_token=8, shared=2048,
        caches=(),
    ),
    _gpt_oss("20b", 32),
    _gpt_oss("120b", 128),
    # openai/whisper-large-v3: config.json.  The encoder has 1500 frames; a token attends to up to
    # 448 other tokens and to the frames.
    Model(
        "whisper-large-v3", 1280, 5120, 20, 20, 64, 51866, gate=None, activation="gelu",
        norm="layer_norm", bias=True, qkv_bias=True, sequences=(1500,), caches=(448, 1500),
        dtype="float16",
    ),
    # google/vit-large-patch16-224, openai/clip-vit-large-patch14-336: config.json.
    Model(
        "vit-l", 1024, 4096, 16, 16, 64, 0, gate=None, activation="gelu", norm="layer_norm",
        bias=True, qkv_bias=True, sequences=(197, 577), caches=(), dtype="float16",
    ),
    _sdxl(640, 10, 4096),
    _sdxl(1280, 20, 1024),
    # black-forest-labs/FLUX.1-dev: transformer/config.json, images of 1024 x 1024 and 512 tokens of
    # text.  Single-stream blocks fuse qkv with the network's input, and both output projections.
    Model(
        "flux", 3072, 12288, 24, 24, 128, 0, gate=None, activation="gelu_tanh", norm="layer_norm",
        norms=((24, 128),), bias=True, qkv_bias=True, caches=(), sequences=(4608,),
        linears=(
            *(Linear(21504, 3072, True), Linear(3072, 15360, True), Linear(3072, 4096, True)),
        ),
    ),
)  # fmt: skip


def by_suite() -> dict[str, tuple[Model, ...]]:
    """Return the models of each suite."""
    found: dict[str, tuple[Model, ...]] = {}
    for model in MODELS:
        found[model.suite] = (*found.get(model.suite, ()), model)
    return found


def linears(model: Model) -> tuple[Linear, ...]:
    """Return the layers that every token passes, without experts and head.

    Gate and up of a gated network are one layer, as checkpoints fuse them.
    """
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    found = model.linears
    if model.plain_attention:
        found += (Linear(queries + 2 * keys, model.hidden, model.qkv_bias),)
        found += (Linear(model.hidden, queries, model.bias),)
    width = model.shared if model.experts else model.intermediate
    return found + feed_forward(replace(model, intermediate=width)) if width else found


def feed_forward(model: Model) -> tuple[Linear, Linear]:
    """Return the layers of a feed-forward network, or of one expert."""
    up = model.intermediate * (1 if model.gate is None else 2)
    return (
        Linear(up, model.hidden, model.bias, model.activation),
        Linear(model.hidden, model.intermediate, model.bias),
    )
