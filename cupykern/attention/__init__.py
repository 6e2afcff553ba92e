"""Attention for prefill and for decoding: masks, plans and the ops."""
