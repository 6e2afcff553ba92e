"""A small document of results, as `bench --json` writes one."""

from __future__ import annotations


def result_row(name: str, median: float, ratio: float = 0.5) -> dict:
    return {
        "name": name,
        "median_us": median,
        "gbps": 4000.0 / median,
        "tflops": None,
        "speed_percent": 100 * 18 / median,
        "verified": ratio <= 1,
        "error_over_bound": ratio,
        "note": None,
    }


DOCUMENT = {
    "kind": "bench",
    "date": "2026-01-02T03:04:05+00:00",
    "target": "cuda",
    "machine": {"device": "NVIDIA H200", "cupy": "14.2.0", "nvrtc": "13.0"},
    "host_time_us": {"softmax": {"call": 11.5, "RawKernel launch": 5.0, "cupy.empty": 2.0}},
    "rows": [
        {
            "op": "softmax",
            "shape": [4096, 4096],
            "dtype": "float16",
            "plain": "copy",
            "plain_us": 18.0,
            "bytes_read": 2**25,
            "bytes_written": 2**25,
            "flops": 0,
            "results": [result_row("cupykern", 20.0), result_row("torch", 50.0, 7.0)],
        }
    ],
}
