"""Planted faults in Hopper's main loop (tests/planted.py)."""

from __future__ import annotations

from planted import Fault, fault_tests
from test_gemm_hopper import FP4, compute, fp8, mixed

from cupykern.gemm.hopper_config import HopperConfig
from cupykern.gemm.matmul_problem import MatmulProblem
from cupykern.gemm.scaled_problem import ScaledProblem
from cupykern.targets import host

RING, MAIN_LOOP = "parts/ring_hopper.cuh", "parts/mainloop_hopper.cuh"
CONVERTED_ROWS, FP4_ROWS = "parts/rows_converted_hopper.cuh", "parts/rows_nvfp4_hopper.cuh"
PROMOTED = "parts/mainloop_promoted_hopper.cuh"
CONVERTED = "parts/mainloop_converted_hopper.cuh"
EPILOGUE = "parts/epilogue_hopper.cuh"
PLAIN, SPLIT = "parts/plain_epilogue_hopper.cuh", "parts/split_sums_hopper.cuh"
# The products added up by the tensor cores alone, but for the two sets.
_PRODUCTS = """            wgmma<RowElement, ColElement>(products, advance(rows, k), advance(cols, k), k > 0);
        }
        wgmma_commit();
        if (set < kSets - 1) return;
        given.next();
    }
    DEVICE void add(int set, const float (&products)[kProducts]) {
        if (kByBlock && set == 0) factors = source.next();
#pragma unroll
        for (int j = 0; j < kProducts; ++j) {
"""
_UNPROMOTED = _PRODUCTS.replace("k > 0", "k > 0 || given.index >= 2 * kStride").replace(
    "++j) {", "++j) {\n            if (given.there()) continue;"
)
FAULTS = {
    "the first stage's parity": Fault(
        RING, "wait(place.parity ^ 1)", "wait(place.parity)", "shared tiles"
    ),
    "the parity of the next round": Fault(
        RING, "            stage = 0;\n            parity ^= 1;", "            stage = 0;", "shared tiles"
    ),
    "no wait for a stage's bytes": Fault(
        MAIN_LOOP, "        ring.full[stage].wait(own.place.parity);\n", "", "shared tiles"
    ),
    "no wait for the last sums": Fault(MAIN_LOOP, "    wgmma_wait<0>(sums);\n", "", "shared tiles"),
    "a stage released while it is multiplied": Fault(
        MAIN_LOOP, "if (!first) ring.release(before);",
        "ring.release(stage);", "shared tiles",
    ),
    "a stage free when one warpgroup is done": Fault(
        RING, "empty[i].init(kReleases);", "empty[i].init(1);", "shared tiles"
    ),
    "the first stage of B for all": Fault(
        MAIN_LOOP, "ColStage::tile(ring.cols[stage], 0, k)", "ColStage::tile(ring.cols[0], 0, k)", "shared tiles"
    ),
    "sums of k that a warpgroup has no stage of": Fault(
        MAIN_LOOP, "    if (kShareK) clear(sums);\n", "", "shared k"
    ),
    "sums of the tile before": Fault(MAIN_LOOP, "!first || k > 0", "true", "shared tiles"),
    "turns without order": Fault(
        MAIN_LOOP, "    if (kPingPong) ring.turn[consumer ^ 1].wait((consumer ^ 1 ^ count) & 1);\n", "", "ping-pong"
    ),
    "stages of the other warpgroup's tile": Fault(
        "gemm_hopper.cu", "work.place.skip(turns * num_k_tiles);", "work.place.skip(num_k_tiles);", "ping-pong"
    ),
    "the turn of every tile the first": Fault(
        MAIN_LOOP, "(consumer ^ 1 ^ count) & 1", "(consumer ^ 1) & 1", "ping-pong"
    ),
    "the tail of k left out": Fault(
        "gemm_hopper.cu", "int all_k_tiles = int(params.num_k_tiles)", "int all_k_tiles = int(params.num_k_tiles) - 1",
        "shared tiles",
    ),
    "a box overwritten before it is stored": Fault(
        PLAIN, "if (lane == 0) tma_store_wait_read<kOwnBoxes ? 0 : 2 - kTogether>();", "", "shared tiles"
    ),
    "every box to the same place": Fault(
        RING, "tma_load(stage + i * step, map", "tma_load(stage, map", "ping-pong"
    ),
    "a box from beside the tile": Fault(
        RING, "{kOuterMajor ? outer + inner :", "{kOuterMajor ? outer :", "ping-pong"
    ),
    "half of a stage's bytes expected": Fault(
        RING, "has_rows ? stage_bytes : ", "has_rows ? RowStage::kBytes : ",
        "shared tiles",
    ),
    "the bias of the next column": Fault(
        EPILOGUE, "const float added = of_col(col_bias, i);", "const float added = of_col(col_bias, i ^ 1);",
        "epilogue",
    ),
    "the bias of the first rows": Fault(
        EPILOGUE, "values[i] * params.alpha + row_bias[i / 2 % 2]", "values[i] * params.alpha + row_bias[0]",
        "bias of rows",
    ),
    "the promotion left out": Fault(PROMOTED, _PRODUCTS, _UNPROMOTED, "same sign"),
    "the scales of the first stage": Fault(PROMOTED, "            from[i] += step[i];\n", "", "blocks"),
    "scales of the stage before": Fault(
        PROMOTED, "slots[(copied + 1) % kSlots];", "slots[copied % kSlots];", "blocks"
    ),
    "the scales of the first block's columns": Fault(
        PROMOTED, ": work.first_col + (number - 16)", ": (number - 16)", "blocks"
    ),
    "the scales of the first rows": Fault(
        PROMOTED, "rows[block * 2 + i / 2 % 2] * cols", "rows[block * 2] * cols", "blocks"
    ),
    "scales that other lanes have not yet copied": Fault(
        PROMOTED, "        copy_async_wait<kSlots - 2>();\n", "", "blocks"
    ),
    "scales over those that other lanes still read": Fault(
        PROMOTED, "        sync_warp();  // all lanes'", "        // all lanes'", "blocks"
    ),
    "scales over sums of the other warpgroup": Fault(
        "gemm_hopper.cu", "if (kPromotes && by_block) named_barrier(3, 128 * kConsumers);", "", "few rows in blocks"
    ),
    "alpha left out": Fault(PLAIN, "kTurned || scale_a ? 1.0f : p.alpha;", "1.0f;", "plain, alpha"),
    "a scale for two columns": Fault(
        PROMOTED, "cols[i / 4 * 2 + i % 2]", "cols[i / 4 * 2]", "few rows in blocks"
    ),
    "no wait for FP8's bytes": Fault(
        PROMOTED, "        wait();\n        give(0, next);", "        give(0, next);", "blocks"
    ),
    "FP8's products added before they are there": Fault(
        PROMOTED,
        "        wgmma_wait<1>(products);\n        ring.release(added.place.stage);\n        add(0, products);",
        "        add(0, products);\n        wgmma_wait<1>(products);\n        ring.release(added.place.stage);",
        "blocks",
    ),
    "the columns of the first chunk": Fault(
        PROMOTED, "ColStage::tile(ring.cols[0], set % kChunks * kProductCols, 0)", "ColStage::tile(ring.cols[0], 0, 0)",
        "wide blocks",
    ),
    "a stage released before its last chunk": Fault(
        PROMOTED, "                if (set == kSets - 1) {\n                    ring.release",
        "                if (set == 0) {\n                    ring.release", "wide blocks",
    ),
    "the right half added before it is there": Fault(
        PROMOTED, "            wgmma_wait<1>(right);\n", "", "halves"
    ),
    "a stage released before its right half is read": Fault(
        PROMOTED, "            wgmma_wait<1>(right);\n            ring.release(stage);\n",
        "            ring.release(stage);\n            wgmma_wait<1>(right);\n", "halves",
    ),
    "no wait for the bytes of halves": Fault(
        PROMOTED, "            wait();\n            give(0, left);", "            give(0, left);", "halves"
    ),
    "the left half's columns for both": Fault(
        PROMOTED, "ColStage::tile(ring.cols[0], set % kChunks * kProductCols, 0)", "ColStage::tile(ring.cols[0], 0, 0)",
        "halves",
    ),
    "columns beyond whole chunks left out": Fault(
        EPILOGUE, "kTileChunks = (kCols + kChunk - 1) / kChunk", "kTileChunks = kCols / kChunk", "halves"
    ),
    "the last chunk where a whole one would be": Fault(
        PLAIN, "{out_col + chunk_col(chunk + i), out_row", "{out_col + (chunk + i) * kChunk, out_row", "halves"
    ),
    "a place of the first columns": Fault(
        PLAIN, "out_col = int(place.words[1]),", "out_col = 0,", "plain"
    ),
    "products of the stage before": Fault(
        PROMOTED, "advance(cols, k), k > 0);", "advance(cols, k), true);", "blocks",
    ),
    "the rows of the first warpgroup": Fault(
        PROMOTED, "row = work.row + set / kChunks * 64;", "row = set / kChunks * 64;", "blocks"
    ),
    "the k of the cluster's first block": Fault(
        "gemm_hopper.cu", "first_k_tile = kSplitK ? rank * all_k_tiles / kClusterSize : 0",
        "first_k_tile = 0", "split k",
    ),
    "the sums of the cluster's other blocks left out": Fault(
        SPLIT, "bit_cast<SumType>(part.words[j]);", "SumType(0);", "split k",
    ),
    "the scales of the first part of k": Fault(PROMOTED, "k = work.first_k_tile + first;", "k = first;", "split k"),
    "factors overwritten before they are read": Fault(PLAIN, "        empty.wait((count & 1) ^ 1);\n", "", "plain"),
    "scales that are still under way": Fault(PLAIN, "full.arrive_expect_tx(bytes);", "full.arrive();", "plain"),
    "scales that TMA does not reach": Fault(PLAIN, "(reinterpret_cast<uint64_t>(from) | bytes) % 16 == 0", "true", "plain"),
    "the next tile's factors": Fault(
        "gemm_hopper.cu", "TileFactors& factors = storage.factors[work.count % kFactors];\n                    store",
        "TileFactors& factors = storage.factors[(work.count + 1) % kFactors];\n                    store", "halves",
    ),
    "the factors of the warp's first rows": Fault(PLAIN, "/ 4 + 8 * (i % 2);", "/ 4;", "plain"),
    "the factors of the first chunk's columns": Fault(
        PLAIN, "first + wgmma_col(lane, i / 4 * 4)", "wgmma_col(lane, i / 4 * 4)", "plain"
    ),
    "a bias left out": Fault(PLAIN, "uint32_t(bias != nullptr)", "0u", "plain"),
    "a stage that the cluster's other block still reads": Fault(
        RING, "empty[stage].release_remote(thread);", "empty[stage].arrive();", "cluster"
    ),
    "the first block's columns for all": Fault(RING, "rank * (kOuter / kClusterSize)", "0", "cluster"),
    "the rows of the cluster's first block": Fault(
        "gemm_hopper.cu", "+= cluster_rank() * kRows;", "+= 0;", "cluster"
    ),
    "the rows of the cluster's other blocks left out": Fault(
        "gemm_hopper.cu", "kTurned || task.row < params.epilogue.m;", "kTurned || cluster_rank() == 0;", "cluster"
    ),
    "the other warpgroup's half left out": Fault(
        "gemm_hopper.cu", "                add_shared_sums(storage, warpgroup, sums);\n", "", "shared k"
    ),
    "sums added before they are there": Fault(
        "gemm_hopper.cu",
        "    named_barrier(3, 128 * kConsumers);\n#pragma unroll\n    for (int i = 0; i < kBlocks * kCols / 2; ++i) {\n        if (warpgroup == 0)",
        "#pragma unroll\n    for (int i = 0; i < kBlocks * kCols / 2; ++i) {\n        if (warpgroup == 0)",
        "shared k",
    ),
    "every stage for both warpgroups": Fault(
        RING, "if (kShareK && work.consumer > 0) next(1);", "", "shared k"
    ),
    "registers of the products under way converted": Fault(
        CONVERTED, "wgmma_wait<1>(next);", "", "mixed (N, K)"
    ),
    "the numbers of the first step twice": Fault(
        CONVERTED, "(step + kAhead - kSteps) * kDepth);", "0);", "mixed (N, K)"
    ),
    "no wait for the next stage to convert": Fault(
        CONVERTED, "                ring.full[then.place.stage].wait(then.place.parity);\n", "", "mixed (N, K)"
    ),
    "turns without stages are not passed on": Fault(
        CONVERTED, "    turns.pass_rest();\n", "", "odd turns"
    ),
    "no wait for the stage of a turn": Fault(
        CONVERTED, "        ring.full[stage].wait(own.place.parity);\n", "", "turns"
    ),
    "a turn's stage is released while it is multiplied": Fault(
        CONVERTED, "        wgmma_wait<0>(sums, a);\n", "", "turns"
    ),
    "the upper 8 of k twice": Fault(
        CONVERTED_ROWS, "reinterpret_cast<const uint16_t*>(p + 8)", "reinterpret_cast<const uint16_t*>(p)", "mixed (N, K)"
    ),
    "the swizzle of (K, N) left out": Fault(
        CONVERTED_ROWS, "stage + RowStage::place(k + 32 * i + lane, row)",
        "stage + (k + 32 * i + lane) * RowStage::kLine + row", "mixed (K, N)"
    ),
    "columns in the order of registers": Fault(
        EPILOGUE, "kPairedRows ? lane / 4 * 2 + half :", "false ? 0 :", "mixed (K, N)"
    ),
    "the two columns of a register exchanged": Fault(
        EPILOGUE, "pack<half>(values[first_of_pair(i)], values[first_of_pair(i) + kApart])",
        "pack<half>(values[first_of_pair(i) + kApart], values[first_of_pair(i)])", "mixed (K, N)",
    ),
    "the turn left out": Fault(
        EPILOGUE, "store_matrix<kTurned>(row, four)", "store_matrix<false>(row, four)", "mixed (N, K)"
    ),
    "a box stored before all warps have filled it": Fault(
        EPILOGUE, "    fence_async_proxy();\n    sync();\n",
        "    fence_async_proxy();\n", "mixed (K, N)",
    ),
    "a box filled before it is stored": Fault(
        EPILOGUE, "if (stores) tma_store_wait_read<1>();", "", "mixed (N, K)"
    ),
    "the first part for all": Fault(
        "parts/turned_epilogue_hopper.cuh", "if (known == part) pick(known);", "if (known == 0) pick(known);", "mixed (K, N)"
    ),
    "a turned bias of the first rows": Fault(
        PLAIN, "of_row = row + row_of_half(lane, half);", "of_row = row + row_of_half(lane, 0);", "few rows"
    ),
    "scales of the stage between": Fault(
        FP4_ROWS, "own / kStageWords * kStride * kStageWords", "own / kStageWords * kStageWords", "nvfp4, shared k"
    ),
    "scales of the first part of k for all": Fault(
        FP4_ROWS, "(work.first_k_tile + (kShareK ? work.consumer : 0))", "(kShareK ? work.consumer : 0)", "nvfp4, split k"
    ),
    "sums stored before the others are read": Fault(
        SPLIT, "if (kFree) named_barrier(3, 128 * kConsumers);", "", "nvfp4, split k"
    ),
    "gelu of the first columns": Fault(
        PLAIN, "values[i] = activate_plain<kActivation>(values[i]);",
        "if (i > 3) values[i] = activate_plain<kActivation>(values[i]);", "activated",
    ),
    "a residual's boxes of the tile before": Fault(
        PLAIN, "        full[number % 2].wait(number / 2 & 1);\n", "        full[number % 2].wait(0);\n", "residual"
    ),
    "a residual added before it is there": Fault(
        PLAIN, "            if constexpr (kAdds) residual.wait(count, number + i);\n", "", "residual"
    ),
    "a residual over results that are not yet stored": Fault(
        PLAIN, "        tma_store_wait_read<0>();\n        load(count, i + 2, row, col, batch);",
        "        load(count, i + 2, row, col, batch);", "residual",
    ),
    "a residual over results of the tile before": Fault(
        PLAIN, "            tma_store_wait_read<0>();\n#pragma unroll\n            for (int i = 0; i < kTileBoxes",
        "#pragma unroll\n            for (int i = 0; i < kTileBoxes", "residual",
    ),
    "a residual's first columns for all": Fault(
        PLAIN, "chunk_col(OwnChunks().first + i % OwnChunks::kCount)", "chunk_col(OwnChunks().first)", "residual"
    ),
    "a residual's box of the cluster's first block": Fault(
        PLAIN, "chunk_col(OwnChunks().first + i % OwnChunks::kCount)", "chunk_col(i % OwnChunks::kCount)",
        "residual, split k",
    ),
    "the two columns of a residual's register exchanged": Fault(
        EPILOGUE, "values[first_of_pair(i)] += low;\n        values[first_of_pair(i) + kApart] += high;",
        "values[first_of_pair(i)] += high;\n        values[first_of_pair(i) + kApart] += low;",
        "residual, turned",
    ),
    "a residual of the batch's first matrix": Fault(
        PLAIN, "uint32_t(batch.offset(kResidual, task.batch))", "0", "residual"
    ),
    "FP32 results where lines are not permuted": Fault(
        PLAIN, "(col / 4 ^ line % 8)", "(col / 4)", "floats"
    ),
    "FP32 results of the first columns": Fault(PLAIN, "{out_col + first, out_row", "{out_col, out_row", "floats"),
    "the whole bias to half a sum": Fault(
        PLAIN, "p.activation == kGelu ? 0.5f : 1.0f", "1.0f", "activated"
    ),
    "k from its middle to its end": Fault(
        RING, "i + ahead < num_k_tiles ? i + ahead : i + ahead - num_k_tiles", "i + ahead", "mixed, few rows"
    ),
    "the tiles' factors all the first one's": Fault(
        "gemm_hopper.cu", "params.epilogue, params.batch, task_of(part)", "params.epilogue, params.batch, first_task",
        "plain",
    ),
    "scales of the other operand": Fault(
        EPILOGUE, "row_scale.load(e.scale_b, p.scale_b_stride, kFloat, row, p.n);",
        "row_scale.load(e.scale_a, p.scale_a_stride, kFloat, row, p.n);", "mixed (N, K)",
    ),
}  # fmt: skip

PROBLEMS = {
    "shared tiles": (
        HopperConfig(128, 128, 2),
        MatmulProblem(520, 264, 456, layout_b="F", out_dtype="bfloat16"),
    ),
    "ping-pong": (
        HopperConfig(128, 64, 3, ping_pong=True),
        MatmulProblem(520, 520, 264, layout_a="F"),
    ),
    "epilogue": (
        HopperConfig(128, 128, 2),
        MatmulProblem(136, 264, 64, bias=(264,), activation="gelu", residual=(136, 264)),
    ),
    "bias of rows": (HopperConfig(128, 128, 2), MatmulProblem(136, 264, 64, bias=(136, 1))),
    "blocks": (HopperConfig(128, 128, 2), fp8(136, 392, 656, "blocks")),
    "wide blocks": (HopperConfig(128, 256, 2), fp8(136, 392, 656, "blocks")),
    "halves": (HopperConfig(128, 176, 2, cluster=2), fp8(392, 392, 656, "rows")),
    "few rows in blocks": (
        HopperConfig(16, 64, 4, share_k=True, turned=True),
        fp8(20, 136, 1200, "blocks"),
    ),
    "plain": (HopperConfig(128, 128, 2), fp8(650, 392, 272, "rows", bias=(392,))),
    "plain, alpha": (HopperConfig(128, 128, 2), fp8(136, 392, 272, "numbers")),
    "split k": (HopperConfig(128, 128, 2, cluster=2, split_k=True), fp8(136, 136, 656, "blocks")),
    "cluster": (HopperConfig(128, 128, 2, cluster=2), fp8(648, 264, 656, "rows")),
    "activated": (
        HopperConfig(128, 128, 2),
        MatmulProblem(136, 264, 64, bias=(264,), activation="gelu"),
    ),
    "floats": (
        HopperConfig(128, 176, 2, ping_pong=True),
        MatmulProblem(136, 264, 64, layout_b="F", bias=(264,), out_dtype="float32"),
    ),
    "residual": (
        HopperConfig(128, 256, 2),
        MatmulProblem(
            *(648, 520, 64, "bfloat16"),
            batch_a=(2,),
            batch_b=(2,),
            residual=(2, 648, 520),
            activation="silu",
        ),
    ),
    "residual, split k": (
        HopperConfig(128, 128, 2, cluster=2, split_k=True),
        MatmulProblem(136, 136, 264, "bfloat16", layout_b="F", residual=(136, 136)),
    ),
    "residual, turned": (
        HopperConfig(256, 128, 2),
        mixed(264, 264, 272, a="bfloat16", layout_b="F", residual=(264, 264)),
    ),
    "few rows": (
        HopperConfig(16, 64, 4, share_k=True, turned=True),
        MatmulProblem(20, 136, 200, bias=(136,)),
    ),
    "same sign": (
        HopperConfig(64, 64, 4, share_k=True),
        fp8(64, 64, 4096, "none", kind="same_sign", out_dtype="float32"),
    ),
    "mixed (N, K)": (
        HopperConfig(256, 128, 2),
        ScaledProblem(mixed(264, 136, 272, layout_b="F", bias=(136,)), "rows"),
    ),
    "mixed (K, N)": (
        HopperConfig(64, 64, 4, share_k=True, lines=2),
        mixed(136, 144, 272, layout_b="C", bias=(144,), activation="relu"),
    ),
    "shared k": (HopperConfig(64, 64, 4, share_k=True), MatmulProblem(136, 72, 200)),
    "mixed, few rows": (
        HopperConfig(16, 64, 4, share_k=True, lines=2),
        mixed(20, 136, 656, layout_b="F", bias=(136,)),
    ),
    "turns": (
        HopperConfig(64, 64, 4, share_k=True, lines=2),
        mixed(264, 392, 656, "int8", "bfloat16", layout_b="F"),
    ),
    "odd turns": (
        HopperConfig(64, 64, 4, share_k=True, lines=2),
        mixed(264, 392, 528, "int8", "bfloat16", layout_b="F"),
    ),
    "nvfp4, shared k": (FP4[1][0], FP4[0][0]),
    "nvfp4, split k": (FP4[1][1], FP4[0][2]),
}


def _check(name: str) -> None:
    if host.current().schedule != "fifo":
        return  # the first call goes through all that Hopper's main loop has
    for schedule in ("fifo", "lifo", "sticky:1"):
        with host.use(schedule=schedule) as target:
            compute(target, PROBLEMS[name][1], PROBLEMS[name][0])


CHECKS = {name: (lambda name=name: _check(name)) for name in PROBLEMS}


test_nothing_fails_without_a_fault, test_caught = fault_tests(FAULTS, checks=CHECKS)
