import os

# Before numpy is imported: the FP64 products of `check` are small, and more threads only wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from cupykern.cli import main

if __name__ == "__main__":  # worker processes import this file, too
    raise SystemExit(main())
