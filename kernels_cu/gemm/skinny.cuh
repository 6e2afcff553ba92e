// The parts of skinny GEMM: stages of A and B, their copies by lanes, and the product of a warp.
#pragma once
#include "gemm/skinny_fma.cuh"
#include "gemm/misaligned_tile.cuh"
#include "gemm/epilogue/linear_combination.cuh"
#include "gemm/nvfp4.cuh"
#include "common/shared_tile.cuh"

struct SkinnyGemmParams {
    int64_t a_row, b_row;  // row strides of A and of B (MN-major: of k), in elements
    int32_t k, padding;
    struct { int64_t block, quarter, row, word; } groups;  // GroupScales of NVFP4
    EpilogueParams epilogue;
};

constexpr int kWarps = kNumThreads / kWarpSize, kColFragments = kTileN / 16;
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
// Of misaligned K-major rows of 16-bit elements every eighth has the same alignment.  A block
// computes such columns: it reads B's chunks from their aligned start, and A from as many elements
// before its own.
constexpr int kPhases = kMisaligned && !kMnMajorB ? 8 : 1;
static_assert(kDepth % kStep == 0 && kTileN % 16 == 0, "whole fragments");
static_assert(kRows == 8 || kRows == 16 || (kRows == 4 && kSame<Compute, float>),
              "one fragment, or half of one");
template <class T> struct SkinnyMma;  // a warp's share, by tensor cores
using WarpProduct =
    typename Choose<kSame<Compute, float>, gemm::SkinnyFma<Compute>, SkinnyMma<Compute>>::Type;

// m <= 8: the fragment repeats its 8 rows; the copies' accumulators are unused.
struct AlignedA : SharedTile<kRows, kDepth* int(sizeof(ElementA))> {
    DEVICE const void* operator()(int row, int chunk) const {
        return &this->chunks[this->index(row % kRows, chunk)];
    }
};
constexpr int kPerElement = kScaled ? 2 : 1;  // values of an element of B
constexpr int kRowsB = kMnMajorB ? kDepth : kTileN,
              kRowB = kMnMajorB ? kTileN : kDepth / kPerElement;
using TileA =
    typename Choose<(kPhases > 1), MisalignedTile<ElementA, kRows, kDepth>, AlignedA>::Type;
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
    TileB b;
};
// A lane's share of an operand's copies, stage by stage.
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

// A lane's share of the copies of NVFP4's scales, in words of four.
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
    // Copies the scales of `rows` rows and `elements` of k, a multiple of a word's; the
    // rest of the tile becomes zero.
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
DEVICE void load_fragments(Fragment* fragments, int stride, const Tile& tile,
                           const RowPhases& phases, int first, int k) {
    if constexpr (kIsMisaligned<Tile>) {
        collect_fragment(fragments[0], [&](int mn, int i) {
            return kMnMajor ? phases.row(tile, k + i)[first + mn]
                            : phases.row(tile, first + mn)[k + i];
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
    Fragment acc[kColFragments][1] = {};

    DEVICE void multiply(const SkinnyStage& stage, const RowPhases& of_a, const RowPhases& of_b) {
#pragma unroll
        for (int k = 0; k < kDepth; k += kStep) {
            constexpr int kCount = kMixedInput ? 2 : 1;
            FragmentA<T> cols[kCount][kColFragments];
            FragmentB<T> rows[kCount][1];
            load_fragments<ElementA, false>(&rows[0][0], 1, stage.a, of_a, 0, k);
#pragma unroll
            for (int n = 0; n < kColFragments; ++n) {
                load_fragments<ElementB, kMnMajorB>(&cols[0][n], kColFragments, stage.b, of_b,
                                                    n * 16, k);
            }
#pragma unroll
            for (int i = 0; i < kCount; ++i) mma(acc, cols[i], rows[i]);
        }
    }
    DEVICE void store(Scalar (&to)[kRows][kTileN + 4]) const {
#pragma unroll
        for (int n = 0; n < kColFragments; ++n) {
#pragma unroll
            for (int i = 0; i < Fragment::kCount; ++i) {
                const int row = Fragment::col(lane_id(), i);
                if (row >= kRows) continue;
                const int col = stored_column<ElementB, T, kMnMajorB>(Fragment::row(lane_id(), i));
                to[row][n * 16 + col] = acc[n][0].values[i];
            }
        }
    }
};
using ElementAccumulator = typename WarpProduct::Scalar;
struct SkinnyGemmStorage {
    union Warp {
        SkinnyStage stages[kStages];
        ElementAccumulator acc[kRows][kTileN + 4];
    } warps[kWarps];
};

// Zeroes the `count` elements that the first stage has before its rows.
template <class Stage>
DEVICE void clear_heads(Stage& stage, const RowPhases& of_a, int count) {
    for (int row = lane_id(); row < kTileN; row += kWarpSize) {
        auto* b = static_cast<ElementB*>(stage.b(row, 0));
        for (int i = 0; i < count; ++i) b[i] = ElementB();
    }
    for (int row = lane_id(); row < kRows; row += kWarpSize) {
        for (int i = 0; i < count; ++i) of_a.row(stage.a, row)[i] = ElementA();
    }
}

// The epilogue of kRun contiguous columns of a row, by one thread.
constexpr int kRun = 4, kRowRuns = kTileN / kRun;
constexpr int kOwnRuns = (kRows * kRowRuns + kNumThreads - 1) / kNumThreads;
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
    DEVICE void store(const MatrixEpilogue& epilogue, const ElementAccumulator (&acc)[kRun]) const {
        const EpilogueParams& p = epilogue.params;
        if constexpr (kSame<ElementAccumulator, int>) {
            if (p.out_dtype == kInt32) return epilogue.store(row, col, acc);
        }
        float values[kRun];
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            values[i] = float(acc[i]) * scales[i] * factor * p.alpha + bias[i];
        }
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
