"""cupykern's attention for models of Hugging Face transformers.

    import cupykern.transformers

    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.bfloat16, attn_implementation="cupykern"
    )

The import registers "cupykern" with transformers' AttentionInterface and AttentionMaskInterface.
Masks are those of "sdpa": bool, or None where causality suffices.  Models run in float16 or
bfloat16, without gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from . import attention, decode_attention
from . import torch as _operators  # noqa: F401, which torch.compile takes

NAME = "cupykern"
_UNKNOWN = ("position_bias", "cache", "head_mask")


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in place of its eager attention.

    >>> q = torch.ones(1, 4, 8, 64, dtype=torch.bfloat16)
    >>> out, _ = attention_forward(torch.nn.Identity(), q, q[:, :2], q[:, :2], None)
    >>> out.shape
    torch.Size([1, 8, 4, 64])

    query: (B, H, Sq, D), float16 or bfloat16.
    key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), cached ones included; H is a multiple of Hkv.
    attention_mask: bool (B or 1, H or 1, Sq, >= Sk), True = keep, or a bias; it includes causality
        and windows.  None: causal if is_causal (None: module.is_causal) and Sq > 1, over the last
        sliding_window keys.
    softcap: c in scores c tanh(s / c).  s_aux: (H,), sinks: scores of keys whose value is 0.

    Returns (out, None), out of shape (B, Sq, H, Dv); attention weights are not returned.

    One query without a mask, a decoding step, runs in decode_attention, all others in attention.

    Raises NotImplementedError for dropout, position_bias, a paged cache, head_mask and float32,
    RuntimeError for tensors that require grad.
    """
    given = [name for name in _UNKNOWN if options.get(name) is not None]
    if dropout or given:
        lacks = ", ".join(["dropout"] * bool(dropout) + given)
        raise NotImplementedError(
            f"attn_implementation={NAME!r} has no {lacks}: use 'sdpa' or 'eager' for "
            f"{type(module).__name__}"
        )
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(
            f"attn_implementation={NAME!r} takes float16 and bfloat16, not {query.dtype}: load the "
            f"model with dtype=torch.bfloat16"
        )
    queries, keys = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = is_causal and queries > 1
    if attention_mask is not None:
        attention_mask = attention_mask[..., :keys]
    elif is_causal and keys > queries:  # the first call with a static cache, whose rest is empty
        key, value, keys = key[:, :, :queries], value[:, :, :queries], queries
    if attention_mask is None and sliding_window is not None and keys > sliding_window:
        attention_mask, is_causal = _window(query, keys, sliding_window, is_causal), False
    same: dict[str, Any] = {"scale": scaling, "softcap": softcap}
    same["sinks"] = None if s_aux is None else s_aux.float()
    if attention_mask is None and queries == 1:
        out = decode_attention(query, key, value, **same)
        return out.transpose(1, 2).contiguous(), None
    heads_last = (x.transpose(1, 2) for x in (query, key, value))
    causal = is_causal and attention_mask is None
    out = attention(*heads_last, causal=causal, mask=attention_mask, layout="bshd", **same)
    return out, None


def _window(query: torch.Tensor, keys: int, window: int, is_causal: bool) -> torch.Tensor:
    """The mask (Sq, keys) of a sliding window, True = keep, for queries at the last positions.

    A query attends to keys less than `window` before it and, if not causal, as many after it.
    """
    at = torch.arange(keys, device=query.device)
    before = at[keys - query.shape[2] :, None] - at
    return (before < window) & (before >= 0 if is_causal else before > -window)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
