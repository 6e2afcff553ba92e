"""Row kernels: softmax, norms, quantization and the non-finite report, row by row."""
