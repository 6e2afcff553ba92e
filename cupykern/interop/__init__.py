"""Arrays of other libraries: torch, JAX, and all that exports DLPack or `__cuda_array_interface__`."""
