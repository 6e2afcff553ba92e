"""Matrix products: tasks, configs, heuristics and plans; also those of quantize_nvfp4."""
