"""Row kernels: softmax, norms, quantization and the non-finite report, a row of a matrix at a time."""
