"""A decoder-only language model of the ops: what `bench --model` times and examples/llama.py runs.

config: its figures; linear: its products, by format of the weights; decoder: a layer and the whole;
cache: keys and values; graph: a step as a CUDA graph; random_weights and hugging_face: where
weights come from; reference: the same in FP64.
"""
