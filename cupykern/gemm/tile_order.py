"""The order in which a product's blocks compute its tiles: kernels_cu/gemm/work_tile.cuh's
TileOrder."""

from __future__ import annotations

import numpy as np

from ..param_structs import fast_divmod

_GROUP = 8  # rows of tiles of a group, for kernels whose tiles all run once


def fill_order(
    order: np.ndarray, tiles_m: int, tiles_n: int, batch: int, group: int = _GROUP
) -> None:
    """order: a zeroed TileOrder.  group: rows of tiles that run down before the next column."""
    group = min(group, tiles_m)
    whole, rest = divmod(tiles_m, group)
    order["split"] = fast_divmod(batch * tiles_m * tiles_n)
    order["matrix"] = fast_divmod(tiles_m * tiles_n)
    order["group"] = fast_divmod(group * tiles_n)
    order["rows"], order["last_rows"] = fast_divmod(group), fast_divmod(max(1, rest))
    order["whole_groups"] = whole
