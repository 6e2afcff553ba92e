"""Planted faults in Hopper's main loop (tests/support/planted.py)."""

from __future__ import annotations

from gemm_hopper_problems import (
    FP4,
    MANY_GROUPS,
    MIXED_BLOCKS,
    check_fp8_integers,
    compute,
    fp8,
    mixed,
)
from planted import Fault, fault_tests

from cupykern.gemm.sm90_gemm_config import Sm90Fp8GemmConfig, Sm90GemmConfig, Sm90MixedGemmConfig
from cupykern.gemm.sm90_policies import Cooperative, Multicast, PingPong, SlicedK, SplitK
from cupykern.ops.problems.products import MatmulProblem
from cupykern.ops.problems.scaled import ScaledProblem
from cupykern.targets import host

PIPELINE, STAGE = "pipeline/tma_pipeline.cuh", "gemm/stage_operand.cuh"
KERNEL, SCHEDULER, LOADER = "gemm/kernel_sm90.cuh", "gemm/scheduler.cuh", "gemm/load_tile.cuh"
MAINLOOP, SS = "gemm/mainloop_sm90.cuh", "gemm/mainloop_sm90_ss.cuh"
FP8, RS = "gemm/mainloop_sm90_ss_fp8.cuh", "gemm/mainloop_sm90_rs.cuh"
CONVERT_8BIT, CONVERT_NVFP4 = "gemm/convert_8bit.cuh", "gemm/convert_nvfp4.cuh"
TILE, OPS, BOX = "gemm/epilogue/tile.cuh", "gemm/epilogue/ops.cuh", "gemm/epilogue/store_box.cuh"
BROADCAST, RESIDUAL = "gemm/epilogue/broadcast.cuh", "gemm/epilogue/residual.cuh"
STORE_TMA, SWAP_AB = "gemm/epilogue/store_tma.cuh", "gemm/epilogue/store_tma_swap_ab.cuh"
EPILOGUE, REDUCE = "gemm/epilogue/matmul.cuh", "gemm/reduce.cuh"
EPILOGUE_TILE = "gemm/epilogue/tile.cuh"
# The products added up by the tensor cores alone, but for the two partial accumulators.
_PRODUCTS = """wgmma<RowElement, ColElement>(partial, advance(rows, k), advance(cols, k), k > 0);
            }
            wgmma_commit();
            if (index < kPartials - 1) return;
            issued.next();
        }
        // A pair's columns are half of one B, half of the other, whose scales take registers in
        // turn.
        DEVICE void promote(int index, const Partial& partial) {
#pragma unroll
            for (int j = 0; j < kPartialSize; ++j) {
"""
_UNPROMOTED = _PRODUCTS.replace("k > 0", "k > 0 || issued.index >= 2 * kStride").replace(
    "++j) {", "++j) {\n            if (issued.valid()) continue;"
)
# Promoted after every fourth stage of a partial accumulator, 512 of k.
_EVERY_512 = _PRODUCTS.replace("k > 0", "k > 0 || issued.index / kStride / 2 % 4 > 0").replace(
    "++j) {",
    "++j) {\n if (issued.valid() && (issued.index / kStride / 2 - 1) % 4 != 3) continue;",
)
FAULTS = {
    "the first stage's parity": Fault(
        PIPELINE, "wait(state.phase ^ 1)", "wait(state.phase)", "shared tiles"
    ),
    "the parity of the next round": Fault(
        PIPELINE, "            stage = 0;\n            phase ^= 1;", "            stage = 0;",
        "shared tiles"
    ),
    "no wait for a stage's bytes": Fault(
        SS, "storage.pipeline.consumer_wait(stages.state);", "", "shared tiles"
    ),
    "no wait for the last accumulators": Fault(
        SS, "wgmma_wait<0>(accumulator);", "", "shared tiles"
    ),
    "a stage released while it is multiplied": Fault(
        SS, "if (!first) storage.pipeline.consumer_release(before);",
        "storage.pipeline.consumer_release(stage);", "shared tiles",
    ),
    "a stage free when one warpgroup is done": Fault(
        PIPELINE, "empty[i].init(kArrivals, ", "empty[i].init(1, ", "shared tiles"
    ),
    "the first stage of B for all": Fault(
        SS, "StageCols::descriptor(storage.cols[stage], 0, k)",
        "StageCols::descriptor(storage.cols[0], 0, k)", "shared tiles"
    ),
    "accumulators of k that a warpgroup has no stage of": Fault(
        SS, "if (kSlicedK) Base::clear(accumulator);", "", "shared k"
    ),
    "accumulators of the tile before": Fault(SS, "!first || k > 0", "true", "shared tiles"),
    "turns without order": Fault(
        SS, "if (kPingPong) storage.order[consumer ^ 1].wait((consumer ^ 1 ^ count) & 1);", "",
        "ping-pong"
    ),
    "stages of the other warpgroup's tile": Fault(
        KERNEL, "work.state.skip(tile_stride * num_k_tiles);", "work.state.skip(num_k_tiles);",
        "ping-pong"
    ),
    "the turn of every tile the first": Fault(
        SS, "(consumer ^ 1 ^ count) & 1", "(consumer ^ 1) & 1", "ping-pong"
    ),
    "the tail of k left out": Fault(
        SCHEDULER, "int all = int(params.num_k_tiles)", "int all = int(params.num_k_tiles) - 1",
        "shared tiles",
    ),
    "a box overwritten before it is stored": Fault(
        STORE_TMA, "if (lane == 0) tma_store_wait_read<kOwnBoxes ? 0 : 2 - kChunksPerStore>();", "",
        "shared tiles"
    ),
    "every box to the same place": Fault(
        STAGE, "tma_load(stage + i * step, map", "tma_load(stage, map", "ping-pong"
    ),
    "a box from beside the tile": Fault(
        STAGE, "{kMnMajor ? extent + contiguous :", "{kMnMajor ? extent :", "ping-pong"
    ),
    "half of a stage's bytes expected": Fault(
        MAINLOOP, "StageRows::bytes(rows.left) + StageCols::bytes(cols.left);",
        "StageRows::bytes(rows.left);", "shared tiles",
    ),
    "the bytes of whole boxes expected at the edge": Fault(
        STAGE, "/ kSwizzleRows * kSwizzleRows * (kBytes / kExtent);",
        "/ kSwizzleRows * kSwizzleRows * (kBytes / kExtent) * 2;", "plain",
    ),
    "boxes beyond an MN-major matrix expected": Fault(
        STAGE, "(left + kBoxExtent - 1) / kBoxExtent * kBoxBytes;", "kBytes;", "ping-pong"
    ),
    "the map of whole boxes at the edge": Fault(
        STAGE, "is_edge && !kMnMajor ? edge : whole;", "whole;", "plain"
    ),
    "a cluster's last slice by the map of whole ones": Fault(
        MAINLOOP, "return cols.left - slice_begin() <", "return cols.left <", "slices"
    ),
    "the bias of the next column": Fault(
        OPS, "const float added = of_col(col_bias, i);",
        "const float added = of_col(col_bias, i ^ 1);",
        "epilogue",
    ),
    "the bias of the first rows": Fault(
        OPS, "values[i] * params.alpha + row_bias[i / 2 % 2]",
        "values[i] * params.alpha + row_bias[0]",
        "bias of rows",
    ),
    "the promotion left out": Fault(FP8, _PRODUCTS, _UNPROMOTED, "same sign"),
    "promoted every 512 of k": Fault(FP8, _PRODUCTS, _EVERY_512, "fp8 integers"),
    "the scales of the first stage": Fault(
        FP8, "row_of_lane + kRowsAtOnce * i, k);", "row_of_lane + kRowsAtOnce * i, 0);", "blocks"
    ),
    "scales of the stage before": Fault(
        FP8, "storage.scales[state.stage][at]", "storage.scales[state.stage][at ? at - 1 : 0]",
        "blocks"
    ),
    "the scales of the first block's columns": Fault(
        EPILOGUE, "tile.col / kScaleBlock * b.col", "0", "blocks"
    ),
    "the scales of the first rows": Fault(FP8, "i % 2 : i / 2 % 2]", "i % 2 : 0]", "blocks"),
    "scales over those that consumers still read": Fault(
        FP8, "if (rows == 0) storage.scales_empty[state.stage].wait(state.phase ^ 1);", "",
        "long blocks"
    ),
    "scales of one stage, which the other warpgroup does not release": Fault(
        FP8, "if (kStride > 1 && k == end && k % kScaleK == 1) release();", "",
        "few rows in long blocks"
    ),
    "alpha left out": Fault(
        BROADCAST, "!Tile::kRowScales || scale_a ? 1.0f : p.alpha;", "1.0f;", "plain, alpha"
    ),
    "a scale for two columns": Fault(
        FP8, "kSwapAB ? i / 4 * 2 + i % 2", "kSwapAB ? i / 4 * 2", "few rows in blocks"
    ),
    "no wait for FP8's bytes": Fault(
        FP8, "wait();\n issue(0, next);", "issue(0, next);", "blocks"
    ),
    "FP8's products added before they are there": Fault(
        FP8,
        "wgmma_wait<1>(partial);\n release(promoted.state.stage);\n promote(0, partial);",
        "promote(0, partial);\n wgmma_wait<1>(partial);\n release(promoted.state.stage);",
        "blocks",
    ),
    "the columns of the first chunk": Fault(
        FP8, "StageCols::descriptor(storage.cols[0], index % kPartials * kPartialCols, 0)",
        "StageCols::descriptor(storage.cols[0], 0, 0)",
        "wide",
    ),
    "a stage released before its last chunk": Fault(
        FP8, "if (index == kPartials - 1) {\n release", "if (index == 0) {\n release",
        "wide",
    ),
    "the right half added before it is there": Fault(
        FP8, "wgmma_wait<1>(right);", "", "halves"
    ),
    "a stage released before its right half is read": Fault(
        FP8, "wgmma_wait<1>(right);\n release(stage);", "release(stage);\n wgmma_wait<1>(right);",
        "halves",
    ),
    "no wait for the bytes of halves": Fault(
        FP8, "promote(0, left);\n wait();\n issue(0, left);", "promote(0, left);\n issue(0, left);",
        "halves"
    ),
    "the left half's columns for both": Fault(
        FP8, "StageCols::descriptor(storage.cols[0], index % kPartials * kPartialCols, 0)",
        "StageCols::descriptor(storage.cols[0], 0, 0)",
        "halves",
    ),
    "columns beyond whole chunks left out": Fault(
        TILE, "kOwnChunks = (kOwnCols + kChunk - 1) / kChunk", "kOwnChunks = kOwnCols / kChunk",
        "halves"
    ),
    "the last chunk where a whole one would be": Fault(
        STORE_TMA, "{out_col + Tile::chunk_col(chunk + i), out_row",
        "{out_col + (chunk + i) * kChunk, out_row", "halves"
    ),
    "a place of the first columns": Fault(
        STORE_TMA, "out_col = int(origin.words[1]),", "out_col = 0,", "plain"
    ),
    "products of the stage before": Fault(
        FP8, "advance(cols, k), k > 0);", "advance(cols, k), true);", "blocks",
    ),
    "the rows of the first warpgroup": Fault(
        FP8, "row = work.row;", "row = 0;", "blocks"
    ),
    "the k of the cluster's first block": Fault(
        SCHEDULER, "first_k_tile = kSplitK ? rank * all / kClusterSize : 0", "first_k_tile = 0",
        "split k",
    ),
    "the accumulators of the cluster's other blocks left out": Fault(
        REDUCE, "bit_cast<ElementAccumulator>(four.words[j]);", "ElementAccumulator(0);", "split k",
    ),
    "the scales of the first part of k": Fault(
        EPILOGUE, "first_k_tile * a.col", "0", "split k"
    ),
    "factors overwritten before they are read": Fault(
        BROADCAST, "        empty.wait((count & 1) ^ 1);\n", "", "plain"
    ),
    "scales that are still under way": Fault(
        BROADCAST, "full.arrive_expect_tx(bytes);", "full.arrive();", "plain"
    ),
    "scales that TMA does not reach": Fault(
        BROADCAST, "(reinterpret_cast<uint64_t>(from) | bytes) % 16 == 0", "true", "plain"
    ),
    "the next tile's factors": Fault(
        EPILOGUE, "Broadcast& broadcast = shared.broadcasts[work.count % kBroadcasts];\n store_tma",
        "Broadcast& broadcast = shared.broadcasts[(work.count + 1) % kBroadcasts];\n store_tma",
        "halves",
    ),
    "the factors of the warp's first rows": Fault(BROADCAST, "/ 4 + 8 * (i % 2);", "/ 4;", "plain"),
    "no scales of columns": Fault(
        STORE_TMA, "if (kScales) values[i] *= of_col(0, i);", "", "plain"
    ),
    "the bias of the scales' columns": Fault(
        STORE_TMA, "of_col(Broadcast::kColVectors - 1, i);", "of_col(0, i);", "plain"
    ),
    "the factors of the first chunk's columns": Fault(
        STORE_TMA, "first + wgmma_col(lane, i / 4 * 4)", "wgmma_col(lane, i / 4 * 4)", "plain"
    ),
    "a bias left out": Fault(BROADCAST, "uint32_t(bias != nullptr)", "0u", "plain"),
    "a stage that the cluster's other block still reads": Fault(
        PIPELINE, "empty[stage].release_remote(thread);", "empty[stage].arrive();", "cluster"
    ),
    "the first block's columns for all": Fault(
        STAGE, "rank * (kExtent / kClusterSize)", "0", "cluster"
    ),
    "the rows of the cluster's first block": Fault(
        SCHEDULER, "+= cluster_rank() * Mainloop::kRows;", "+= 0;", "cluster"
    ),
    "the last rows are not loaded": Fault(
        STAGE, "if (kEdge && may_end && left <= (kMnMajor ? i * kBoxExtent : 0)) break;",
        "if (kEdge) break;",
        "cluster",
    ),
    "the other warpgroup's half left out": Fault(
        EPILOGUE, "Reduction::add(&staging[4], warpgroup, accumulator);", "", "shared k"
    ),
    "accumulators added before they are there": Fault(
        REDUCE,
        "named_barrier(3, 128 * Mainloop::kConsumers);\n#pragma unroll\n for (int i = 0; i < "
        "kSize; ++i) {\n if (warpgroup == 0)",
        "\n#pragma unroll\n for (int i = 0; i < kSize; ++i) {\n if (warpgroup == 0)",
        "shared k",
    ),
    "every stage for both warpgroups": Fault(
        MAINLOOP, "if (kSlicedK && work.consumer > 0) next(1);", "", "shared k"
    ),
    "registers of the products under way converted": Fault(
        RS, "wgmma_wait<1>(next);", "", "mixed (N, K)"
    ),
    "the numbers of the first step twice": Fault(
        RS, "(step + kAhead - kSteps) * kDepth);", "0);", "mixed (N, K)"
    ),
    "no wait for the next stage to convert": Fault(
        RS, "if (step + kAhead == kSteps) storage.pipeline.consumer_wait(then.state);", "",
        "mixed (N, K)"
    ),
    "mixed blocks: products of the stage before": Fault(
        RS, "(!kBlockScales && !first) || step > 0", "!first || step > 0", "mixed blocks, split k"
    ),
    "mixed blocks: promoted before they are there": Fault(
        RS, "wgmma_wait<0>(partial);", "", "mixed blocks, split k"
    ),
    "mixed blocks: a stage released while it is multiplied": Fault(
        RS, "wgmma_wait<0>(partial);\n storage.pipeline.consumer_release(stage);",
        "storage.pipeline.consumer_release(stage);\n wgmma_wait<0>(partial);",
        "mixed blocks, split k"
    ),
    "mixed blocks: the last stage is not promoted": Fault(
        RS, "scales.promote(partial, stages.index", "if (!stages.last())\n"
        "scales.promote(partial, stages.index", "mixed blocks"
    ),
    "mixed blocks in turn: products of the stage before": Fault(
        RS, "StageCols::step(i * kMmaK)), (!kBlockScales && !first)",
        "StageCols::step(i * kMmaK)), !first", "mixed blocks"
    ),
    "mixed blocks in turn: promoted before they are there": Fault(
        RS, "wgmma_wait<0>(sums, a);", "", "mixed blocks"
    ),
    "mixed blocks: the scale of the stage before": Fault(
        RS, "index / kStride % kWarpSize);", "(index / kStride + 31) % kWarpSize);", "mixed blocks"
    ),
    "mixed blocks: the first 32 scales for all": Fault(
        RS, "if (index / kStride % kWarpSize != 0) return;", "if (index / kStride != 0) return;",
        "mixed blocks, long k"
    ),
    "mixed blocks: scales of both warpgroups' stages for one's": Fault(
        RS, "% kWarpSize * kStride;", "% kWarpSize;", "mixed blocks, long k"
    ),
    "mixed blocks: the scale of a's first row for all": Fault(
        RS, "a_at(wgmma_col(thread, i), index)", "a_at(wgmma_col(thread, 0), index)",
        "mixed blocks"
    ),
    "mixed blocks: the scales of a's first block of k for all": Fault(
        RS, "a_at(wgmma_col(thread, i), index)", "a_at(wgmma_col(thread, i), 0)", "mixed blocks"
    ),
    "mixed blocks: the scales of the first part of k for all": Fault(
        EPILOGUE, "block_scales(own, work.first_k_tile)", "block_scales(own, 0)",
        "mixed blocks, split k"
    ),
    "turns without stages are not passed on": Fault(
        RS, "order.finish();", "", "odd turns"
    ),
    "no wait for the stage of a turn": Fault(
        RS, "Fragment a[kSteps];\n storage.pipeline.consumer_wait(stages.state);",
        "Fragment a[kSteps];", "turns"
    ),
    "a turn's stage is released while it is multiplied": Fault(
        RS, "wgmma_wait<0>(accumulator, a);", "", "turns"
    ),
    "the upper 8 of k twice": Fault(
        CONVERT_8BIT, "reinterpret_cast<const uint16_t*>(p + 8)",
        "reinterpret_cast<const uint16_t*>(p)", "mixed (N, K)"
    ),
    "the swizzle of (K, N) left out": Fault(
        CONVERT_8BIT, "stage + Stage::offset(k + 32 * i + lane, row)",
        "stage + (k + 32 * i + lane) * Stage::kRowBytes + row", "mixed (K, N)"
    ),
    "columns in the order of registers": Fault(
        TILE, "kPairedRows ? lane / 4 * 2 + half :", "false ? 0 :", "mixed (K, N)"
    ),
    "the two columns of a register exchanged": Fault(
        BOX,
        "pack<half>(values[first_of_pair(i)], values[first_of_pair(i) + kPairStride])",
        "pack<half>(values[first_of_pair(i) + kPairStride], values[first_of_pair(i)])",
        "mixed (K, N)",
    ),
    "the turn left out": Fault(
        BOX, "store_matrix<kSwapAB>(row, four)", "store_matrix<false>(row, four)", "mixed (N, K)"
    ),
    "a box stored before all warps have filled it": Fault(
        BOX, "    fence_async_proxy();\n    sync();\n",
        "    fence_async_proxy();\n", "mixed (K, N)",
    ),
    "a box filled before it is stored": Fault(
        BOX, "if (stores) tma_store_wait_read<kWhole ? 0 : 1>();", "", "mixed (N, K)"
    ),
    "a whole tile written while TMA reads the one before": Fault(
        BOX, "tma_store_wait_read<kWhole ? 0 : 1>", "tma_store_wait_read<1>", "many tiles"
    ),
    "the first chunk of a whole tile stored alone": Fault(
        BOX, "i < (kWhole ? Tile::kChunks : 1)", "i < 1", "FP8 widths"
    ),
    "the chunks of a whole tile from one box": Fault(
        BOX, "to + at * kSwizzleBytes", "to", "FP8 widths"
    ),
    "groups of tiles have eight rows": Fault(
        "gemm/work_tile.cuh", "group * order.rows.divisor", "group * 8", "many groups"
    ),
    "the last group of tiles as high as the others": Fault(
        "gemm/work_tile.cuh", "(whole ? order.rows : order.last_rows)", "order.rows", "many groups"
    ),
    "the last columns of a whole tile left out": Fault(
        EPILOGUE_TILE, "kOwnCols - kSlice;\n", "kOwnCols - kSlice - 8;\n", "FP8 widths"
    ),
    "the first part for all": Fault(
        SWAP_AB, "if (known == i) pick(", "if (known == 0) pick(", "mixed (K, N)"
    ),
    "swap-AB: a bias of the first rows": Fault(
        SWAP_AB, "of_row = store.row + 64 * m + Tile::row_of_half(threadIdx.x % 32, half);",
        "of_row = store.row + 64 * m + Tile::row_of_half(threadIdx.x % 32, 0);", "few rows"
    ),
    "swap-AB: a bias of the first 64 rows": Fault(
        SWAP_AB, "of_row = store.row + 64 * m + Tile::row_of_half(threadIdx.x % 32, half);",
        "of_row = store.row + Tile::row_of_half(threadIdx.x % 32, half);", "widths"
    ),
    "swap-AB: the upper 64 rows stored over the lower": Fault(
        SWAP_AB, "out_row + 64 * m,", "out_row,", "widths"
    ),
    "swap-AB: the scale of a slice's first column": Fault(
        SWAP_AB, "return pairs[i / 4].values[i % 2];", "return pairs[0].values[0];", "FP8 widths"
    ),
    "swap-AB: the scales of the first slice": Fault(
        SWAP_AB, "scales(broadcast, Tile::slice_col(slice));", "scales(broadcast, 0);", "FP8 widths"
    ),
    "the last chunk of columns beyond the tile": Fault(
        EPILOGUE_TILE, "(in_own < kOwnCols - kChunk ? in_own : kOwnCols - kChunk)", "in_own",
        "FP8 widths"
    ),
    "whole chunks between the columns of a cluster's blocks": Fault(
        EPILOGUE_TILE, "chunk / kOwnChunks * kOwnCols", "chunk / kOwnChunks * kOwnChunks * kChunk",
        "widths, split k"
    ),
    "scales of the stage between": Fault(
        CONVERT_NVFP4, "own / kStageWords * kStride * kStageWords",
        "own / kStageWords * kStageWords", "nvfp4, shared k"
    ),
    "scales of the first part of k for all": Fault(
        CONVERT_NVFP4, "(work.first_k_tile + (Mainloop::kSlicedK ? work.consumer : 0))",
        "(Mainloop::kSlicedK ? work.consumer : 0)", "nvfp4, split k"
    ),
    "accumulators stored before the others are read": Fault(
        REDUCE, "if (kOwnMemory) named_barrier(3, 128 * Mainloop::kConsumers);", "",
        "nvfp4, split k"
    ),
    "gelu of the first columns": Fault(
        STORE_TMA, "values[i] = activate_16bit<kActivation>(values[i]);",
        "if (i > 3) values[i] = activate_16bit<kActivation>(values[i]);", "activated",
    ),
    "a residual's boxes of the tile before": Fault(
        RESIDUAL, "full[index % 2].wait(index / 2 & 1);", "full[index % 2].wait(0);", "residual"
    ),
    "a residual added before it is there": Fault(
        STORE_TMA, "if constexpr (kAdds) residual.wait(count, index + i);", "", "residual"
    ),
    "a residual over results that are not yet stored": Fault(
        RESIDUAL, "        tma_store_wait_read<0>();\n        load(count, i + 2, row, col, batch);",
        "        load(count, i + 2, row, col, batch);", "residual",
    ),
    "a residual over results of the tile before": Fault(
        RESIDUAL,
        "            tma_store_wait_read<0>();\n#pragma unroll\n            for (int i = 0; i < "
        "kTileBoxes",
        "#pragma unroll\n            for (int i = 0; i < kTileBoxes", "residual",
    ),
    "a residual's first columns for all": Fault(
        RESIDUAL, "chunk_col(OwnChunks().first + i % OwnChunks::kCount)",
        "chunk_col(OwnChunks().first)", "residual"
    ),
    "a residual's box of the cluster's first block": Fault(
        RESIDUAL, "chunk_col(OwnChunks().first + i % OwnChunks::kCount)",
        "chunk_col(i % OwnChunks::kCount)",
        "residual, split k",
    ),
    "the two columns of a residual's register exchanged": Fault(
        BOX,
        "values[first_of_pair(i)] += low;\n"
        "        values[first_of_pair(i) + kPairStride] += high;",
        "values[first_of_pair(i)] += high;\n"
        "        values[first_of_pair(i) + kPairStride] += low;",
        "residual, swap-AB",
    ),
    "a residual of the batch's first matrix": Fault(
        BROADCAST, "uint32_t(batch.offset(kResidual, tile.batch))", "0", "residual"
    ),
    "FP32 results whose rows are not swizzled": Fault(
        STORE_TMA, "(box_col / 4 ^ box_row % 8)", "(box_col / 4)", "floats"
    ),
    "FP32 results of the first columns": Fault(
        STORE_TMA, "{out_col + at, out_row", "{out_col, out_row", "floats"
    ),
    "FP32 results of columns behind the tile's": Fault(
        STORE_TMA, "col < kCols - kFloats ? col : kCols - kFloats", "col", "floats, odd boxes"
    ),
    "FP32 results over a box that TMA still reads": Fault(
        EPILOGUE, "kFloats ? of_floats : Tile::kChunks", "Tile::kChunks", "floats, three boxes"
    ),
    "swap-AB: FP32 results over boxes that TMA still reads": Fault(
        SWAP_AB, "if (stores) tma_store_wait_read<1>();", "", "floats, swap-AB"
    ),
    "swap-AB: FP32 results that are not swizzled": Fault(
        SWAP_AB, "(of_row % kBoxRows / 4 ^ at % 8)", "(of_row % kBoxRows / 4)", "floats, swap-AB"
    ),
    "swap-AB: FP32 results of the first 32 rows": Fault(
        SWAP_AB, "out_row + 64 * m + j % 2 * kBoxRows", "out_row + 64 * m", "floats, swap-AB"
    ),
    "swap-AB: FP32 results of a slice's first columns": Fault(
        SWAP_AB, "col + first + j / 2 * kBoxCols", "col + first", "floats, swap-AB"
    ),
    "swap-AB: FP32 results of another block's columns": Fault(
        SWAP_AB,
        "if (!own.has(slice / kSlicesOfChunk)) continue;\n"
        "#pragma unroll\n            for (int j = 0; j < kValues; ++j) picked[j]",
        "#pragma unroll\n            for (int j = 0; j < kValues; ++j) picked[j]",
        "floats, split k",
    ),
    "the whole bias to half a sum": Fault(
        BROADCAST, "p.activation == kGelu ? 0.5f : 1.0f", "1.0f", "activated"
    ),
    "k from its middle to its end": Fault(
        MAINLOOP, "i + ahead < num_k_tiles ? i + ahead : i + ahead - num_k_tiles", "i + ahead",
        "mixed, few rows"
    ),
    "the tiles' factors all the first one's": Fault(
        KERNEL, "epilogue.load(storage.epilogue, scheduler.tile(params, i), count)",
        "epilogue.load(storage.epilogue, first_tile, count)",
        "plain",
    ),
    "scales of the other operand": Fault(
        OPS, "row_scale.load(e.scale_b, p.scale_b_stride, kFloat, row, p.n);",
        "row_scale.load(e.scale_a, p.scale_a_stride, kFloat, row, p.n);", "mixed, general",
    ),
}  # fmt: skip

PROBLEMS = {
    "shared tiles": (
        Sm90GemmConfig(128, 128, 64, 2),
        MatmulProblem(520, 264, 456, layout_b="F", out_dtype="bfloat16"),
    ),
    "ping-pong": (
        Sm90GemmConfig(128, 64, 64, 3, PingPong()),
        MatmulProblem(520, 520, 264, layout_a="F"),
    ),
    "epilogue": (
        Sm90GemmConfig(128, 128, 64, 2),
        MatmulProblem(136, 264, 64, bias=(264,), activation="gelu", residual=(136, 264)),
    ),
    "bias of rows": (Sm90GemmConfig(128, 128, 64, 2), MatmulProblem(136, 264, 64, bias=(136, 1))),
    "blocks": (Sm90Fp8GemmConfig(128, 128, 2), fp8(136, 392, 656, "blocks")),
    "long blocks": (Sm90Fp8GemmConfig(128, 128, 2), fp8(136, 200, 2320, "blocks")),
    "wide": (Sm90Fp8GemmConfig(128, 256, 2), fp8(136, 392, 656, "rows")),
    "halves": (Sm90Fp8GemmConfig(128, 176, 2, cluster=Multicast(2)), fp8(392, 392, 656, "rows")),
    "few rows in blocks": (
        Sm90Fp8GemmConfig(16, 64, 4, SlicedK(), swap_ab=True),
        fp8(20, 136, 1200, "blocks"),
    ),
    "few rows in long blocks": (
        Sm90Fp8GemmConfig(16, 64, 4, SlicedK(), swap_ab=True),
        fp8(20, 136, 1152, "blocks"),
    ),
    "plain": (Sm90Fp8GemmConfig(128, 128, 2), fp8(650, 392, 272, "rows", bias=(392,))),
    "plain, alpha": (Sm90Fp8GemmConfig(128, 128, 2), fp8(136, 392, 272, "numbers")),
    "split k": (Sm90Fp8GemmConfig(128, 128, 2, cluster=SplitK(2)), fp8(136, 136, 656, "blocks")),
    "cluster": (Sm90Fp8GemmConfig(128, 128, 2, cluster=Multicast(2)), fp8(648, 264, 656, "rows")),
    "slices": (Sm90Fp8GemmConfig(128, 128, 2, cluster=Multicast(2)), fp8(136, 200, 272, "rows")),
    "activated": (
        Sm90GemmConfig(128, 128, 64, 2),
        MatmulProblem(136, 264, 64, bias=(264,), activation="gelu"),
    ),
    "floats": (
        Sm90GemmConfig(128, 128, 64, 2, PingPong()),
        MatmulProblem(136, 264, 64, layout_b="F", bias=(264,), out_dtype="float32"),
    ),
    "floats, odd boxes": (
        Sm90Fp8GemmConfig(128, 80, 2),
        fp8(648, 392, 272, "rows", bias=(392,), out_dtype="float32"),
    ),
    "floats, three boxes": (
        Sm90GemmConfig(128, 96, 64, 2),
        MatmulProblem(648, 392, 72, layout_b="F", out_dtype="float32"),
    ),
    "floats, swap-AB": (
        Sm90GemmConfig(152, 128, 64, 2, PingPong(), swap_ab=True),
        MatmulProblem(700, 264, 136, layout_b="F", bias=(264,), out_dtype="float32"),
    ),
    "floats, split k": (
        Sm90MixedGemmConfig(80, 128, 128, 2, cluster=SplitK(2)),
        ScaledProblem(mixed(72, 136, 272, layout_b="F", out_dtype="float32"), "rows"),
    ),
    "floats, few rows": (
        Sm90GemmConfig(16, 64, 64, 4, SlicedK(), swap_ab=True),
        MatmulProblem(20, 136, 200, bias=(136,), out_dtype="float32"),
    ),
    "widths": (
        Sm90GemmConfig(152, 128, 64, 2, PingPong(), swap_ab=True),
        MatmulProblem(300, 264, 136, layout_b="F", bias=(264,)),
    ),
    "widths, split k": (
        Sm90MixedGemmConfig(80, 128, 128, 2, cluster=SplitK(2)),
        mixed(72, 136, 272, layout_b="F"),
    ),
    "FP8 widths": (
        Sm90Fp8GemmConfig(104, 128, 2, swap_ab=True),
        fp8(208, 136, 272, "rows", bias=(136,)),
    ),
    "residual": (
        Sm90GemmConfig(128, 256, 64, 2),
        MatmulProblem(
            *(648, 520, 64, "bfloat16"),
            batch_a=(2,),
            batch_b=(2,),
            residual=(2, 648, 520),
            activation="silu",
        ),
    ),
    "residual, split k": (
        Sm90GemmConfig(128, 128, 64, 2, cluster=SplitK(2)),
        MatmulProblem(136, 136, 264, "bfloat16", layout_b="F", residual=(136, 136)),
    ),
    "residual, swap-AB": (
        Sm90MixedGemmConfig(256, 128, 64, 2),
        mixed(264, 264, 272, a="bfloat16", layout_b="F", residual=(264, 264)),
    ),
    "few rows": (
        Sm90GemmConfig(16, 64, 64, 4, SlicedK(), swap_ab=True),
        MatmulProblem(20, 136, 200, bias=(136,)),
    ),
    "same sign": (
        Sm90Fp8GemmConfig(64, 64, 4, SlicedK()),
        fp8(64, 64, 4096, "none", kind="same_sign", out_dtype="float32"),
    ),
    "mixed (N, K)": (
        Sm90MixedGemmConfig(256, 128, 64, 2),
        ScaledProblem(mixed(264, 136, 272, layout_b="F", bias=(136,)), "rows"),
    ),
    "mixed, general": (
        Sm90MixedGemmConfig(256, 128, 64, 2),
        ScaledProblem(mixed(264, 136, 272, layout_b="F", bias=(264, 1)), "rows"),
    ),
    "mixed (K, N)": (
        Sm90MixedGemmConfig(64, 64, 128, 4, SlicedK()),
        mixed(136, 144, 272, layout_b="C", bias=(144,), activation="relu"),
    ),
    "shared k": (Sm90GemmConfig(64, 64, 64, 4, SlicedK()), MatmulProblem(136, 72, 200)),
    "mixed, few rows": (
        Sm90MixedGemmConfig(16, 64, 128, 4, SlicedK()),
        mixed(20, 136, 656, layout_b="F", bias=(136,)),
    ),
    "turns": (
        Sm90MixedGemmConfig(64, 64, 128, 4, SlicedK()),
        mixed(264, 392, 656, "int8", "bfloat16", layout_b="F"),
    ),
    "many groups": (MANY_GROUPS[1][0], MANY_GROUPS[0][0]),
    "many tiles": (
        Sm90GemmConfig(64, 64, 64, 4, Cooperative(1), swap_ab=True),
        MatmulProblem(264, 392, 64, layout_b="F"),
    ),
    "odd turns": (
        Sm90MixedGemmConfig(64, 64, 128, 4, SlicedK()),
        mixed(264, 392, 528, "int8", "bfloat16", layout_b="F"),
    ),
    "mixed blocks": (MIXED_BLOCKS[1][0], MIXED_BLOCKS[0][1]),
    "mixed blocks, split k": (MIXED_BLOCKS[1][1], MIXED_BLOCKS[0][2]),
    "mixed blocks, long k": (MIXED_BLOCKS[1][2], MIXED_BLOCKS[0][2]),
    "nvfp4, shared k": (FP4[1][0], FP4[0][0]),
    "nvfp4, split k": (FP4[1][1], FP4[0][2]),
}


def _check(name: str) -> None:
    if host.current().schedule != "fifo":
        return  # the first call goes through all that Hopper's main loop has
    for schedule in ("fifo", "lifo", "sticky:1"):
        with host.use(schedule=schedule) as target:
            compute(target, PROBLEMS[name][1], PROBLEMS[name][0])


def _check_fp8_integers() -> None:
    if host.current().warp_size == 32:
        check_fp8_integers(host.current(), Sm90Fp8GemmConfig(64, 64, 4, SlicedK()), 64, 64, 2048)


CHECKS = {name: (lambda name=name: _check(name)) for name in PROBLEMS}
CHECKS["fp8 integers"] = _check_fp8_integers


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, checks=CHECKS
)
