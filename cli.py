import os

# Set before numpy is imported.  The FP64 products of `check` are too small for more threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from cupykern.cli import main

if __name__ == "__main__":  # worker processes import this file, too
    raise SystemExit(main())
