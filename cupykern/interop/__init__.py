"""Arrays of other libraries: torch, JAX, others with DLPack or `__cuda_array_interface__`."""
