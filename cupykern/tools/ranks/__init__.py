"""`bench --parallel`: steps of `cupykern.parallel` on the ranks of an MPI job and on one."""
