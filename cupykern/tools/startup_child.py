"""One first call, timed.  startup.py runs this file as a script: so the import is timed too.

Arguments: target, op, dtype, sizes.  Prints a JSON object of milliseconds.
"""

import json
import sys
import time


def main(target: str, name: str, dtype: str, *sizes: str) -> None:
    if target == "host":
        import numpy  # noqa: F401  # not timed: it is not cupykern's
    else:
        import cupy

        cupy.zeros(1)  # creates the context
        cupy.cuda.Device().synchronize()
    begin = time.perf_counter()
    import cupykern

    imported = time.perf_counter()
    op = next(op for op in cupykern.OPS if op.name == name)
    where = cupykern.targets.get(target)
    call = op.inputs(op.bench_problem(tuple(map(int, sizes)), dtype), 0, where.xp)
    if target != "host":
        cupy.cuda.Device().synchronize()
    called = time.perf_counter()
    op.run(*call.args, **call.kwargs)
    if target != "host":
        cupy.cuda.Device().synchronize()
    end = time.perf_counter()
    print(json.dumps({"import_ms": 1e3 * (imported - begin), "call_ms": 1e3 * (end - called)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
