"""PyTorch's flex_attention under torch.compile ("torch.flex"), with attention's options.

A sink weights the result by its log-sum-exp, like PyTorch's gpt-oss.  torch_attention covers
attention without options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..attention.block_mask import CAUSAL, FULL, PARTIAL, BlockMask
from ..op import Call
from ..ops.problems.attention import BIAS_BY_DISTANCE
from .base import Peer
from .torch_attention import self_attention

_OPTIONS = ("window", "softcap", "alibi_slopes", "sinks", "score", "operands", "mask")


def _build(op: str, call: Call) -> Callable[[], Any] | None:
    found = self_attention(op, call, _OPTIONS) if op == "attention" else None
    if found is None or not _takes(call):
        return None
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    arrays, causal, scale = found
    tensors = q, k, _ = tuple(torch.from_dlpack(x) for x in arrays)
    options = {
        "score_mod": _score_mod(torch, call),
        "block_mask": _block_mask(torch, call, causal, q.device),
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    sinks = _tensor(torch, call.kwargs.get("sinks"))

    def attention(q: Any, k: Any, v: Any) -> Any:
        if sinks is None:
            return flex_attention(q, k, v, **options)
        out, more = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
        share = torch.sigmoid(more.lse - sinks[:, None])
        return (out * share[..., None]).to(out.dtype)

    torch.compiler.reset()  # after the eighth shape torch would fall back to eager
    compiled = torch.compile(attention, dynamic=False, fullgraph=True)
    return lambda: compiled(*tensors)


def _takes(call: Call) -> bool:
    """Return whether the call has options, with only masks and scores that this file supports."""
    mask, options = call.kwargs.get("mask"), call.kwargs.keys() & {"causal", *_OPTIONS}
    if mask is not None and not isinstance(mask, BlockMask):
        return False
    if mask is not None and bool((mask.block_mask_types == PARTIAL).any()):
        return False
    return bool(options) and call.kwargs.get("score") in (None, BIAS_BY_DISTANCE)


def _tensor(torch: Any, x: Any) -> Any:
    return None if x is None else torch.from_dlpack(x)


def _score_mod(torch: Any, call: Call) -> Callable[..., Any] | None:
    """Score options in the same order as ours."""
    cap = call.kwargs.get("softcap")
    slopes = _tensor(torch, call.kwargs.get("alibi_slopes"))
    bias = _tensor(torch, (call.kwargs.get("operands") or {}).get("bias"))
    if cap is None and slopes is None and bias is None:
        return None

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if cap is not None:
            s = cap * torch.tanh(s / cap)
        if bias is not None:
            s = s + bias[h, (i - j).abs().clamp(max=127)]
        if slopes is not None:
            s = s - (slopes[h] if slopes.ndim == 1 else slopes[b, h]) * (i - j).abs()
        return s

    return score_mod


def _block_mask(torch: Any, call: Call, causal: bool, device: Any) -> Any:
    """Build a block mask from causality, a window and our BlockMask; skipped blocks of 128 stay
    skipped."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    left, right = call.kwargs.get("window") or (-1, -1)
    right = 0 if causal else right
    masks: list[Callable[..., Any]] = []
    sizes: tuple[int | None, ...] = None, None
    if right >= 0:
        masks.append(lambda b, h, i, j: j - i <= right)
    if left >= 0:
        masks.append(lambda b, h, i, j: i - j <= left)
    blocks = call.kwargs.get("mask")
    if blocks is not None:
        types = torch.from_dlpack(blocks.block_mask_types)
        sizes = tuple(n if n > 1 else None for n in blocks.batch_shape)
        of_batch, of_heads = (n is not None for n in sizes)
        rows, columns, offset = blocks.q_block, blocks.kv_block, blocks.causal_offset

        def keeps(b: Any, h: Any, i: Any, j: Any) -> Any:
            kind = types[b if of_batch else 0, h if of_heads else 0, i // rows, j // columns]
            return (kind == FULL) | ((kind == CAUSAL) & (j <= i + offset))

        masks.append(keeps)
    if not masks:
        return None
    q, k, _ = call.args
    return create_block_mask(and_masks(*masks), *sizes, q.shape[2], k.shape[2], device=device)


PEERS = (Peer("torch.flex", "torch", _build),)
