"""A decoder-only language model built from the ops, for `bench --model` and examples/llama.py.

config: dimensions; linear: matrix products, by weight format; decoder: a layer and the model;
cache: keys and values; graph: a step as a CUDA graph; random_weights and hugging_face: sources of
weights; reference: the same model in FP64.
"""
