"""Matrix products: their problems, configs and plans, and the ops that fuse with one."""
