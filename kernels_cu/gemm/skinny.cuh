// Building blocks of skinny GEMM, m <= kRows: stages of A and B, their copies by lanes, the product
// of a warp, and the mainloop.
//
// A block computes kTileN columns of one product, or of two products with the same A (kMatrices).
// Its warps split k: each takes kDepth of every kWarps * kDepth.  Each warp streams its part of A
// and B through its own cp.async pipeline of kStages stages, without block barriers in the
// mainloop.  The loads of the epilogue overlap the pipeline's prologue.  The code is kept short:
// with one wave of blocks, no other work hides instruction cache misses.
// The product is computed with swap-AB, because the second operand of mma.sync can have 8 columns:
// m <= 8 costs 8 rows, not 16.
// Constants: ElementA, ElementB; Compute, the type of the multiplication; kRows, the largest m (8
// or a multiple of 16; FP32: 4 or 16); kTileN, kDepth, kStages, kMatrices; kMnMajorB: B is
// MN-major, otherwise K-major like A.  Rows are aligned to 16 bytes and are whole 16-byte chunks.
// kMisaligned: misaligned rows of 16-bit elements and any length; only the operands themselves are
// aligned.
// kBlockScales: A has a scale per row and kScaleBlock of k, B per kScaleBlock x kScaleBlock block.
#pragma once
#include "gemm/skinny_fma.cuh"
#include "gemm/misaligned_tile.cuh"
#include "gemm/epilogue/linear_combination.cuh"
#include "gemm/nvfp4.cuh"
#include "common/shared_tile.cuh"

struct SkinnyGemmParams {
    int64_t a_row, b_row;  // row strides of A and of B (MN-major: of k), in elements
    int32_t k, padding;
    struct { int64_t block, quarter, row, word; } groups;  // strides of GroupScales
    MatrixStrides block_scales_a, block_scales_b;          // of scale_a, scale_b, if kBlockScales
    EpilogueParams epilogue;
};

constexpr int kWarps = kNumThreads / kWarpSize, kMatrixFragments = kTileN / 16;
constexpr int kColFragments = kMatrices * kMatrixFragments, kCols = kMatrices * kTileN;
constexpr int kRowFragments = (kRows + 15) / 16;
// Mixed input: operands are converted between shared memory and fragments, two fragments at once.
constexpr bool kMixedInput =
    sizeof(ElementA) < sizeof(Compute) || sizeof(ElementB) < sizeof(Compute);
constexpr bool kScaled = kSame<ElementB, e2m1x2>;  // NVFP4: two elements along k in a byte
constexpr LaneOrder kLaneOrder =
    kScaled ? LaneOrder::kEights
    : sizeof(ElementA) < sizeof(Compute) || (sizeof(ElementB) < sizeof(Compute) && !kMnMajorB)
        ? LaneOrder::kFours
        : LaneOrder::kPairs;
constexpr int kStep = kMixedInput ? 32 : kFragmentK<Compute>;
// Misaligned K-major rows of 16-bit elements: every eighth row has the same alignment.  A block
// computes columns of equal alignment: it reads B from the aligned start of each row's first chunk,
// and A from the same number of elements before its first one.
constexpr int kSkews = kMisaligned && !kMnMajorB ? 8 : 1;
static_assert(kDepth % kStep == 0 && kTileN % 16 == 0, "whole fragments");
static_assert(kMatrices == 1 || (kMatrices == 2 && !kMisaligned && !kMnMajorB),
              "one product or two");
static_assert(kRows == 8 || kRows % 16 == 0 || (kRows == 4 && kSame<Compute, float>),
              "whole fragments, or half of one");
template <class T> struct SkinnyMma;  // a warp's product, by tensor cores
using WarpProduct =
    typename Choose<kSame<Compute, float>, gemm::SkinnyFma<Compute>, SkinnyMma<Compute>>::Type;
static_assert(!kBlockScales || (kScaleBlock % kDepth == 0 && kScaleBlock % kTileN == 0),
              "a warp's stage and a block's columns are of one block of scales");

// m <= 8: the fragment repeats its 8 rows; the copies' accumulators are unused.
struct AlignedA : SharedTile<kRows, kDepth* int(sizeof(ElementA))> {
    DEVICE const void* operator()(int row, int chunk) const {
        return &this->chunks[this->index(row % kRows, chunk)];
    }
};
constexpr int kPerElement = kScaled ? 2 : 1;  // values per element of B
constexpr int kStepK = kWarps * kDepth;       // k from one stage of a warp to the next
constexpr int kRowsB = kMnMajorB ? kDepth : kTileN,
              kRowB = kMnMajorB ? kTileN : kDepth / kPerElement;
using TileA =
    typename Choose<(kSkews > 1), MisalignedTile<ElementA, kRows, kDepth>, AlignedA>::Type;
using CodesB = typename Choose<kMisaligned && kMnMajorB, MisalignedTile<ElementB, kRowsB, kRowB>,
                               SharedTile<kRowsB, kRowB* int(sizeof(ElementB))>>::Type;
template <bool kScaled> struct TileOf {
    using Type = CodesB;
    DEVICE static CodesB& codes(CodesB& tile) { return tile; }
};
template <> struct TileOf<true> {
    using Type = ScaledTile<kTileN, kScaled ? kDepth : kWordK>;
    DEVICE static auto& codes(Type& tile) { return tile.codes; }
};
using TileB = typename TileOf<kScaled>::Type;
struct SkinnyStage {
    TileA a;
    TileB b[kMatrices];
};
// A lane's copies of an operand, stage by stage.
template <class T, class Tile>
struct LaneCopier {
    static constexpr int kChunks = Tile::kChunks, kPerChunk = 16 / int(sizeof(T));
    static constexpr int kAtOnce = kWarpSize / kChunks;  // rows per iteration
    static_assert(kAtOnce * kChunks == kWarpSize &&
                      (Tile::kRows % kAtOnce == 0 || Tile::kRows < kAtOnce),
                  "whole rows per iteration");
    // L2 prefetch size of cp.async, where other lanes or blocks read the rest of the 128 bytes.
    static constexpr int kL2Prefetch = kMisaligned || kChunks < 8 ? 128 : 0;
    const T* next;  // source of the next stage
    int64_t next_row, next_stage;
    int row, chunk, index;

    DEVICE LaneCopier(const T*, const T* origin, int64_t row_stride, int64_t stage_stride)
        : next_row(kAtOnce * row_stride), next_stage(stage_stride) {
        chunk = lane_id() % kChunks;
        row = opaque(lane_id() / kChunks);  // kept in a register: the loop would recompute it
        index = opaque(Tile::index(row, chunk));
        next = origin + row * row_stride + chunk * kPerChunk;
    }
    DEVICE void start(Tile& tile, int rows, int elements) {
        if (Tile::kRows < kAtOnce && row >= Tile::kRows) return;
        const T* from = next;
        const int own = chunk * kPerChunk < elements ? rows : 0;
        const int bytes = clamp_to(elements - chunk * kPerChunk, kPerChunk) * int(sizeof(T));
#pragma unroll
        for (int first = 0; first < Tile::kRows; first += kAtOnce, from += next_row) {
            // The bits of `row` are below those of `first`.
            void* to = &tile.chunks[(index ^ Tile::swizzle(first)) + first * kChunks];
            if constexpr (!kMisaligned) copy_async<16, kL2Prefetch>(to, from, first + row < own);
            else copy_async_part<kL2Prefetch>(to, from, first + row < own ? bytes : 0);
        }
        next += next_stage;
    }
};

template <class T, class Tile>
using CopierOf =
    typename Choose<kIsMisaligned<Tile>, MisalignedCopier<T, Tile>, LaneCopier<T, Tile>>::Type;

// A lane's copies of NVFP4's scales, in words of four.
template <class Tile>
struct ScaleCopier {
    static constexpr int kRowWords = kScaled ? kDepth / kWordK : 1, kWords = kTileN * kRowWords;
    static constexpr int kOwn = (kWords + kWarpSize - 1) / kWarpSize;
    const e4m3* next[kOwn];
    int64_t next_stage;
    bool aligned;

    DEVICE ScaleCopier(const GroupScales& groups, int64_t first_col, int first_k, int stage_k)
        : next_stage(stage_k / kWordK * groups.word) {
        aligned = (uintptr_t(groups.scales) | uintptr_t(groups.block) | uintptr_t(groups.quarter) |
                   uintptr_t(groups.row)) %
                      kWord ==
                  0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int word = lane_id() + i * kWarpSize;
            next[i] = groups.at(first_col + word / kRowWords,
                                first_k + word % kRowWords * int64_t(kWordK));
        }
    }
    // Copies the scales of `rows` rows and `elements` of k, a multiple of kWordK; the rest of the
    // tile becomes zero.
    DEVICE void start(Tile& tile, int rows, int elements) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int word = lane_id() + i * kWarpSize, row = word / kRowWords;
            if (kWords % kWarpSize != 0 && word >= kWords) break;
            auto& to = tile.words[row][word % kRowWords];
            const bool exists = row < rows && word % kRowWords * kWordK < elements;
            if (aligned) {
                copy_async<kWord>(&to, next[i], exists);
            } else {
                to.words[0] = 0;
                for (int j = 0; exists && j < kWord; ++j) {
                    to.words[0] |= uint32_t(bit_cast<uint8_t>(next[i][j])) << 8 * j;
                }
            }
            next[i] += next_stage;
        }
    }
};

struct NoScales {
    DEVICE NoScales(const GroupScales&, int64_t, int, int) {}
    DEVICE void start(TileB&, int, int) {}
};
template <bool kScaled>
using ScalesOf = typename Choose<kScaled, ScaleCopier<TileB>, NoScales>::Type;

template <class Stored, bool kMnMajor, class Fragment, class Tile>
DEVICE void load_fragments(Fragment* fragments, int stride, const Tile& tile, const RowSkews& skews,
                           int first, int k) {
    if constexpr (kIsMisaligned<Tile>) {
        collect_fragment(fragments[0], [&](int mn, int i) {
            return kMnMajor ? skews.row(tile, k + i)[first + mn]
                            : skews.row(tile, first + mn)[k + i];
        });
    } else if constexpr (kSame<Stored, e2m1x2>) {
        load_scaled(fragments[0], fragments[stride], tile, first, k);
    } else if constexpr (kMixedInput) {
        load_mixed_input<Stored, kMnMajor, kLaneOrder>(fragments[0], fragments[stride], tile, first,
                                                       k);
    } else {
        load_fragment<kMnMajor>(fragments[0], tile, first, k);
    }
}

template <class T>
struct SkinnyMma {
    using Fragment = Accumulator<T>;
    using Scalar = typename Fragment::Scalar;
    Fragment acc[kColFragments][kRowFragments] = {};

    DEVICE void multiply(const SkinnyStage& stage, const RowSkews& of_a, const RowSkews& of_b) {
#pragma unroll
        for (int k = 0; k < kDepth; k += kStep) {
            constexpr int kCount = kMixedInput ? 2 : 1;
            FragmentA<T> cols[kCount][kColFragments];
            FragmentB<T> rows[kCount][kRowFragments];
#pragma unroll
            for (int m = 0; m < kRowFragments; ++m) {
                load_fragments<ElementA, false>(&rows[0][m], kRowFragments, stage.a, of_a, m * 16,
                                                k);
            }
#pragma unroll
            for (int n = 0; n < kColFragments; ++n) {
                load_fragments<ElementB, kMnMajorB>(&cols[0][n], kColFragments,
                                                    stage.b[n / kMatrixFragments], of_b,
                                                    n % kMatrixFragments * 16, k);
            }
#pragma unroll
            for (int i = 0; i < kCount; ++i) mma(acc, cols[i], rows[i]);
        }
    }
    DEVICE void store(Scalar (&to)[kRows][kCols + 4]) const {
#pragma unroll
        for (int n = 0; n < kColFragments; ++n) {
#pragma unroll
            for (int m = 0; m < kRowFragments; ++m) store(to, n, m);
        }
    }
    DEVICE void store(Scalar (&to)[kRows][kCols + 4], int n, int m) const {
#pragma unroll
        for (int i = 0; i < Fragment::kCount; ++i) {
            const int row = m * 16 + Fragment::col(lane_id(), i);
            if (row >= kRows) continue;
            const int col = stored_column<ElementB, T, kMnMajorB>(Fragment::row(lane_id(), i));
            to[row][n * 16 + col] = acc[n][m].values[i];
        }
    }
};
// Block scales of the matrices, in global memory; null: 1.
struct SkinnyScales {
    const float* a;
    const float* b[kMatrices];
    MatrixStrides of_a, of_b[kMatrices];
    int64_t first_col;  // the block's first column

    // `scale` if the epilogue applies it; the mainloop applies block scales.
    DEVICE static const float* of_epilogue(const float* scale) {
        return kBlockScales ? nullptr : scale;
    }
};
// Adds the product of each stage, times its scales, to totals in FP32.
//
// Lane i holds B's scales of every kWarpSize-th stage from the i-th on: one load, long before use.
// A's scales, which the previous kernel wrote, are fetched from L2 one stage ahead.
template <class Product> struct BlockPromotion {
    using Fragment = typename Product::Fragment;
    const SkinnyScales& scales;
    int rows, last_k, stage = 0;
    using RowScales = float[kRowFragments][Fragment::kCount];
    Fragment totals[kColFragments][kRowFragments] = {};
    RowScales a = {};
    float b[kMatrices];

    // [k, last_k): the warp's range of k.
    DEVICE BlockPromotion(const SkinnyScales& scales, int rows, int k, int last_k)
        : scales(scales), rows(rows), last_k(last_k) {
        fetch(k);
    }
    // Loads the scales of the stage that begins at k.
    DEVICE void fetch(int k) {
        if (stage % kWarpSize == 0) fetch_b(k + lane_id() * kStepK);
        if (!scales.a || k >= last_k) return;
        const float* of_block = scales.a + k / kScaleBlock * scales.of_a.col;
#pragma unroll
        for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
            for (int i = 0; i < Fragment::kCount; ++i) {
                const int row = m * 16 + Fragment::col(lane_id(), i);
                if (row < rows) a[m][i] = of_block[row * scales.of_a.row];
            }
        }
    }
    DEVICE void fetch_b(int k) {
        const int64_t block_k = k / kScaleBlock, block_col = scales.first_col / kScaleBlock;
#pragma unroll
        for (int i = 0; i < kMatrices; ++i) {
            const MatrixStrides& steps = scales.of_b[i];
            b[i] = scales.b[i] && k < last_k
                       ? scales.b[i][block_k * steps.row + block_col * steps.col]
                       : 1.0f;
        }
    }
    // k: where the next stage begins.
    DEVICE void promote(Product& product, int k) {
        RowScales of_a;
        float of_b[kMatrices];
#pragma unroll
        for (int i = 0; i < kMatrices; ++i) of_b[i] = shuffle(b[i], stage % kWarpSize);
#pragma unroll
        for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
            for (int i = 0; i < Fragment::kCount; ++i) of_a[m][i] = scales.a ? a[m][i] : 1.0f;
        }
        ++stage;
        fetch(k);
#pragma unroll
        for (int n = 0; n < kColFragments; ++n) {
#pragma unroll
            for (int m = 0; m < kRowFragments; ++m)
                promote(product.acc[n][m], totals[n][m], of_a[m], of_b[n / kMatrixFragments]);
        }
    }
    DEVICE static void promote(Fragment& partial, Fragment& total,
                               const float (&of_a)[Fragment::kCount], float of_b) {
#pragma unroll
        for (int i = 0; i < Fragment::kCount; ++i) {
            total.values[i] += partial.values[i] * (of_a[i] * of_b);
            partial.values[i] = 0;
        }
    }
    DEVICE void finish(Product& product) const {
#pragma unroll
        for (int n = 0; n < kColFragments; ++n) {
#pragma unroll
            for (int m = 0; m < kRowFragments; ++m) product.acc[n][m] = totals[n][m];
        }
    }
};
struct NoPromotion {
    DEVICE NoPromotion(const SkinnyScales&, int, int, int) {}
    DEVICE void promote(WarpProduct&, int) {}
    DEVICE void finish(WarpProduct&) const {}
};
using Promotion = typename Choose<kBlockScales, BlockPromotion<WarpProduct>, NoPromotion>::Type;
using ElementAccumulator = typename WarpProduct::Scalar;
constexpr int kRun = 4, kRowRuns = kTileN / kRun;  // kRun: columns that a thread finishes
constexpr int kOwnRuns = (kRows * kRowRuns + kNumThreads - 1) / kNumThreads;
struct SkinnyGemmStorage {
    union Warp {
        SkinnyStage stages[kStages];
        ElementAccumulator acc[kRows][kCols + 4];  // padded against bank conflicts
    } warps[kWarps];

    // Adds kRun adjacent accumulators of all warps to totals.
    DEVICE void add(int row, int col, ElementAccumulator (&totals)[kRun]) const {
#pragma unroll
        for (int from = 0; from < kWarps; ++from) {
#pragma unroll
            for (int j = 0; j < kRun; ++j) totals[j] += warps[from].acc[row][col + j];
        }
        if constexpr (kScaled) {
#pragma unroll
            for (ElementAccumulator& total : totals) total *= 1.0f / kScaledUnit<Compute>;
        }
    }
};

// Zeros the `count` elements that precede each row in the first stage.
template <class Stage>
DEVICE void clear_heads(Stage& stage, const RowSkews& of_a, int count) {
    for (int row = lane_id(); row < kTileN; row += kWarpSize) {
        auto* b = static_cast<ElementB*>(stage.b[0](row, 0));
        for (int i = 0; i < count; ++i) b[i] = ElementB();
    }
    for (int row = lane_id(); row < kRows; row += kWarpSize) {
        for (int i = 0; i < count; ++i) of_a.row(stage.a, row)[i] = ElementA();
    }
}

// A lane's copies of a matrix B.
struct MatrixCopier {
    CopierOf<ElementB, CodesB> codes;
    ScalesOf<kScaled> scales;

    // begin: the operand.  columns: the block's first column, at the warp's first k.
    template <class Groups>
    DEVICE MatrixCopier(const ElementB* begin, const ElementB* columns, int64_t row,
                        const e4m3* group_scales, const Groups& groups, int64_t first_col,
                        int first_k)
        : codes(begin, columns, row, kMnMajorB ? kStepK * row : kStepK / kPerElement),
          scales({group_scales, groups.block, groups.quarter, groups.row, groups.word}, first_col,
                 first_k, kStepK) {}
    DEVICE void start(TileB& tile, int cols, int elements) {
        codes.start(TileOf<kScaled>::codes(tile), kMnMajorB ? elements : cols,
                    kMnMajorB ? cols : elements / kPerElement);
        scales.start(tile, cols, elements);
    }
};

// Address of the block's first column of B, at the warp's first k.
DEVICE const ElementB* own_columns(const ElementB* b, int64_t row, int64_t first_col, int first_k) {
    return b + (kMnMajorB ? first_col + first_k * row : first_col * row + first_k / kPerElement);
}

// A warp's part of the operands.
struct SkinnyOperands {
    int rows, cols;       // valid ones
    int first_k, last_k;  // of this warp
    int before;           // elements of a row's first chunk that precede the row
    RowSkews skews_a, skews_b;
};

// Computes the block's accumulators in storage.warps[...].acc.  `prepare` loads the epilogue's
// operands.
template <class Prepare>
DEVICE void multiply_columns(SkinnyGemmStorage& storage, const SkinnyOperands& x,
                             CopierOf<ElementA, TileA>& of_a, MatrixCopier (&of_b)[kMatrices],
                             const SkinnyScales& scales, Prepare prepare) {
    auto& own = storage.warps[int(threadIdx.x) / kWarpSize];
    int to_load = x.last_k - x.first_k, next_stage = 0;
    const auto load_next = [&] {
        if (to_load > 0) {
            SkinnyStage& stage = own.stages[next_stage];
#pragma unroll
            for (int i = 0; i < kMatrices; ++i) of_b[i].start(stage.b[i], x.cols, to_load);
            of_a.start(stage.a, x.rows, to_load);
        }
        copy_async_commit();
        to_load -= kStepK;
        next_stage = next_stage + 1 < kStages ? next_stage + 1 : 0;
    };
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) load_next();
    Promotion promotion(scales, x.rows, x.first_k, x.last_k);
    prepare();
    WarpProduct product;
    int stage = 0;
#pragma unroll 1
    for (int k = x.first_k; k < x.last_k; k += kStepK) {
        copy_async_wait<kStages - 2>();
        sync_warp();  // this stage has arrived, and all lanes have read the one before it
        load_next();
        if constexpr (kSkews > 1) {
            if (k == 0 && x.before > 0) {
                clear_heads(own.stages[stage], x.skews_a, x.before);
                sync_warp();
            }
        }
        product.multiply(own.stages[stage], x.skews_a, x.skews_b);
        promotion.promote(product, k + kStepK);
        stage = stage + 1 < kStages ? stage + 1 : 0;
    }
    copy_async_wait<0>();
    sync_warp();  // the accumulators overwrite the stages
    promotion.finish(product);
    product.store(own.acc);
    sync_block();
}

// The epilogue of kRun contiguous columns of a row, by one thread.
struct FinishedRun {
    int row, tile_col;
    int64_t col;
    int count;  // valid columns
    float scales[kRun], bias[kRun] = {}, residual[kRun] = {}, factor = 1.0f;

    DEVICE void prepare(const MatrixEpilogue& epilogue, int number, int64_t first_col) {
        const EpilogueParams& p = epilogue.params;
        row = number / kRowRuns;
        tile_col = number % kRowRuns * kRun;
        col = first_col + tile_col;
        count = row < p.m ? clamp_to(p.n - col, kRun) : 0;
#pragma unroll
        for (int i = 0; i < kRun; ++i) scales[i] = 1.0f;
        if (count == 0) return;
        if (epilogue.scale_b) {
            load_run(epilogue.scale_b + col * p.scale_b_stride, p.scale_b_stride, count, scales);
        }
        if (epilogue.scale_a) factor = epilogue.scale_a[row * p.scale_a_stride];
        if (epilogue.bias) {
            MatrixEpilogue::add(epilogue.bias, p.bias_dtype, p.bias, row, col, count, bias);
        }
        if (epilogue.residual) {
            MatrixEpilogue::add(epilogue.residual, p.residual_dtype, p.residual, row, col, count,
                                residual);
        }
    }
    DEVICE void scale(const EpilogueParams& p, const ElementAccumulator (&acc)[kRun],
                      float (&values)[kRun]) const {
#pragma unroll
        for (int i = 0; i < kRun; ++i) values[i] = float(acc[i]) * scales[i] * factor * p.alpha;
    }
    DEVICE void store(const MatrixEpilogue& epilogue, const ElementAccumulator (&acc)[kRun]) const {
        const EpilogueParams& p = epilogue.params;
        if constexpr (kSame<ElementAccumulator, int>) {
            if (p.out_dtype == kInt32) return epilogue.store(row, col, acc);
        }
        float values[kRun];
        scale(p, acc, values);
#pragma unroll
        for (int i = 0; i < kRun; ++i) values[i] += bias[i];
        if (p.activation != kNoActivation) {
#pragma unroll 1
            for (int i = 0; i < kRun; ++i) {
                // A rolled loop saves code: the values rotate through values[0].
                const float first = activate(values[0], p.activation);
                values[0] = values[1];
                values[1] = values[2];
                values[2] = values[3];
                values[3] = first;
            }
        }
#pragma unroll
        for (int i = 0; i < kRun; ++i) values[i] += residual[i];
        epilogue.write(row, col, count, values);
    }
};

// Stores the runs of the block's valid `rows` rows and `cols` columns by an epilogue that loads
// nothing ahead.
template <class Epilogue>
DEVICE void store_runs(const SkinnyGemmStorage& storage, const Epilogue& epilogue,
                       int64_t first_col, int rows, int cols) {
#pragma unroll
    for (int i = 0; i < kOwnRuns; ++i) {
        const int number = int(threadIdx.x) + i * kNumThreads, row = number / kRowRuns;
        const int tile_col = number % kRowRuns * kRun;
        if (row >= rows || tile_col >= cols) continue;
        ElementAccumulator totals[kRun] = {};
        storage.add(row, tile_col, totals);
        epilogue.store(row, first_col + tile_col, totals);
    }
}
