"""Run-time state shared by calls: loaded kernels, plans, chosen configs and workspace."""
