"""What calls share at run time: loaded kernels, plans, chosen configs and workspace."""
