"""The same steps in PyTorch with NCCL: BF16 F.linear and all_reduce, gathered keys for SDPA."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ... import parallel
from ...tuning.timing import Function
from ..model.tensor_parallel import Cut
from .cases import Mlp, Problem, Ring
from .decode import Decode
from .world import World


class TorchPeer:
    """PyTorch on all ranks; `close` ends its process group."""

    name = "torch"

    def __init__(self, world: World):
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        torch.cuda.set_device(world.local)
        self._folder = tempfile.TemporaryDirectory() if world.rank == 0 else None
        folder = world.shared(self._folder and self._folder.name)
        dist.init_process_group(
            "nccl",
            init_method=(Path(folder) / "store").as_uri(),
            rank=world.rank,
            world_size=world.size,
            device_id=torch.device("cuda", world.local),
        )

    def close(self) -> None:
        self._dist.destroy_process_group()
        if self._folder is not None:
            self._folder.cleanup()

    def step(self, problem: Problem, ranks: int) -> Function | None:
        """Return the whole step for one rank, or this rank's part."""
        rank = self._dist.get_rank() if ranks > 1 else 0
        if isinstance(problem, Mlp):
            return self._mlp(problem, ranks, rank)
        if isinstance(problem, Ring):
            return self._attention(problem, ranks, rank)
        if isinstance(problem, Decode):
            return self._decode(problem, ranks, rank)
        return None

    def captured(self, function: Function) -> Function:
        """Capture a CUDA graph; torch.cuda.graph requires warm-up runs on a side stream."""
        torch = self._torch
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad():
            with torch.cuda.stream(stream):
                for _ in range(3):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            # The process group's watchdog queries events from another thread.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = function()

        def replay() -> Any:
            graph.replay()
            return out

        return replay

    def _sum(self, x: Any, ranks: int) -> Any:
        if ranks > 1:
            self._dist.all_reduce(x)
        return x

    def _mlp(self, mlp: Mlp, ranks: int, rank: int) -> Function:
        torch, functional = self._torch, self._torch.nn.functional
        part = parallel.shares(mlp.size[2], ranks)[rank]
        x, gate, up, down = map(torch.from_dlpack, (mlp.x, mlp.gate, mlp.up, mlp.down))
        gate, up, down = gate[part], up[part], down[:, part].contiguous()

        def run() -> tuple[Any, Any]:
            inner = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
            return self._sum(functional.linear(inner, down), ranks), inner

        return run

    def _attention(self, ring: Ring, ranks: int, rank: int) -> Function:
        """Gather keys and values of all ranks; then compute attention for each query piece."""
        from torch.nn.attention.bias import causal_lower_right

        torch, attend = self._torch, self._torch.nn.functional.scaled_dot_product_attention
        if ranks == 1:
            q, k, v = map(torch.from_dlpack, (ring.q, ring.k, ring.v))
            return lambda: attend(q, k, v, is_causal=True, enable_gqa=True)
        own = [torch.from_dlpack(ring.cut(x, ranks)[rank]) for x in (ring.q, ring.k, ring.v)]
        pieces = parallel.zigzag(ring.size[0], ranks)
        order = torch.cat([torch.arange(a.start, a.stop) for of in pieces for a in of])
        place = torch.argsort(order).to(own[0].device)
        counts = [sum(a.stop - a.start for a in of) for of in pieces]
        length = pieces[rank][0].stop - pieces[rank][0].start

        def whole(x: Any) -> Any:
            parts = [x.new_empty((*x.shape[:2], n, x.shape[3])) for n in counts]
            self._dist.all_gather(parts, x)
            return torch.cat(parts, 2).index_select(2, place)

        def run() -> Any:
            q, k, v = own[0], whole(own[1]), whole(own[2])
            found = []
            both = q[:, :, :length], q[:, :, length:]
            for queries, piece in zip(both, pieces[rank], strict=True):
                mask = causal_lower_right(queries.shape[2], piece.stop)
                keys, values = k[:, :, : piece.stop], v[:, :, : piece.stop]
                found.append(attend(queries, keys, values, attn_mask=mask, enable_gqa=True))
            return torch.cat(found, 2)

        return run

    def _decode(self, decode: Decode, ranks: int, rank: int) -> Function | None:
        """Eager operations; the step writes its keys and values to a copy of the cache."""
        torch, functional = self._torch, self._torch.nn.functional
        whole = decode.whole
        config = whole.config
        plain = config.gate == "silu" and config.embedding_scale == 1 and not config.qkv_bias
        if not plain or config.softcap or config.logit_softcap or config.head_norms:
            return None
        if config.post_norms or any(kind.window is not None for kind in config.kinds):
            return None
        cut = Cut.of_rank(config, ranks, rank)
        own, width, eps = cut.config(config), config.head_dim, config.norm_eps
        at, end = config.q_width, config.q_width + config.kv_width
        kv = slice(cut.kv.start // width, cut.kv.stop // width)
        to = torch.from_dlpack
        layers = []
        for number, layer in enumerate(whole.layers):
            qkv = to(layer.qkv.weight)
            parts = (qkv[cut.q], qkv[at:end][cut.kv], qkv[end:][cut.kv])
            caches = (
                to(of[number])[:, kv].clone() for of in (decode.cache.keys, decode.cache.values)
            )
            inv_freq, factor = whole.rotations[number]
            angles = (decode.size[1] - 1) * to(inv_freq)
            layers.append(
                (
                    *(to(layer.input_norm), torch.cat(parts)),
                    *(to(layer.out.weight)[:, cut.q].contiguous(), to(layer.mlp_norm)),
                    *(to(x.weight)[cut.inner] for x in (layer.gate, layer.up)),
                    *(to(layer.down.weight)[:, cut.inner].contiguous(), *caches),
                    *(angles.cos() * factor, angles.sin() * factor),
                )
            )  # fmt: skip
        head = to(whole.head.weight)[parallel.shares(config.vocab, ranks)[rank]]
        embedding, norm, tokens = to(whole.embedding), to(whole.norm), to(decode.tokens)[:, 0]
        last, (batch, _) = decode.size[1] - 1, decode.size

        def rotated(x: Any, cos: Any, sin: Any) -> Any:
            a, b = x.float().chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

        def run() -> Any:
            x = functional.embedding(tokens, embedding)
            for before, qkv, out, between, gate, up, down, keys, values, cos, sin in layers:
                y = functional.rms_norm(x, x.shape[-1:], before, eps)
                y = functional.linear(y, qkv).view(batch, -1, 1, width)
                q, k, v = y.split((own.heads, own.kv_heads, own.kv_heads), 1)
                keys[:, :, last : last + 1] = rotated(k, cos, sin)
                values[:, :, last : last + 1] = v
                mixed = functional.scaled_dot_product_attention(
                    rotated(q, cos, sin),
                    keys,
                    values,
                    enable_gqa=True,
                    scale=config.attention_scale,
                )
                x = x + self._sum(functional.linear(mixed.reshape(batch, -1), out), ranks)
                y = functional.rms_norm(x, x.shape[-1:], between, eps)
                inner = functional.silu(functional.linear(y, gate)) * functional.linear(y, up)
                x = x + self._sum(functional.linear(inner, down), ranks)
            y = functional.rms_norm(x, x.shape[-1:], norm, eps)
            return functional.linear(y, head).float()

        return run
