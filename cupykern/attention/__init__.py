"""Attention for prefill and decoding: masks, tasks, configs and plans."""
