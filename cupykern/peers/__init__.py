"""Peers: other libraries' functions for the same problems, for `bench --against`.

One file per family, each with a tuple PEERS.  A peer gets the same arrays as the op: torch tensors
share their memory through DLPack.
"""

from __future__ import annotations

from .base import Peer, to_array

__all__ = ["Peer", "all_peers", "to_array"]


def all_peers() -> dict[str, Peer]:
    """Return every peer by name; imports none of the libraries."""
    from . import cupyx, flash_attn, flex_attention, liger, nvmath, quack, torch, torch_attention

    families = (torch, torch_attention, flex_attention, flash_attn, quack, liger, cupyx, nvmath)
    peers = [peer for family in families for peer in family.PEERS]
    by_name = {peer.name: peer for peer in peers}
    if len(by_name) < len(peers):
        raise ValueError(f"two peers share a name: {[peer.name for peer in peers]}")
    return by_name
