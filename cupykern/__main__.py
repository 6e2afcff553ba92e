"""`python -m cupykern` is the command `cupykern`."""

from .cli import main

if __name__ == "__main__":  # worker processes import this file, too
    raise SystemExit(main())
