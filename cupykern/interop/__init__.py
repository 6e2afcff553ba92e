"""Arrays of other libraries: torch, JAX, any with DLPack or `__cuda_array_interface__`."""
