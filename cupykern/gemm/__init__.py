"""Products of matrices: their problems, configs and plans, and the ops that fuse something with one."""
