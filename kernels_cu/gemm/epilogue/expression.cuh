// The epilogue with a user's formula on Hopper: the general epilogue's scales, then Expression
// (expression/apply.cuh), in registers.  TMA stores 16-bit outputs where possible; others are
// stored from the registers.
#pragma once
#include "gemm/epilogue/matmul.cuh"
#include "gemm/epilogue/operand_fragment.cuh"
#include "gemm/epilogue/store_quad.cuh"

namespace gemm {

struct ExpressionMatmulParams {
    MatmulParams matmul;
    ExpressionParams expression;
};

struct ExpressionArguments : MatmulArguments { ExpressionOperands operands; };

// General: MatmulEpilogue<Mainloop, General>.
template <class General, class Expression> struct ExpressionEpilogueSm90 : General {
    using Mainloop = typename General::Mainloop;
    using Arguments = ExpressionArguments;
    using Accumulator = typename General::Accumulator;
    using WorkTile = typename General::WorkTile;
    using Tile = typename General::Tile;
    using Ops = EpilogueOps<Tile>;
    static constexpr bool kBackToBack = false, kSwapAB = General::kSwapAB;
    static constexpr int kValues = Tile::kValues, kSlices = Tile::kSlices;
    using Values = float[kValues];
    using Results = float[Expression::kResults][kValues];
    using Narrow = typename Expression::Narrow;
    using Rows = typename Expression::Rows;
    using Fragments = typename FragmentsOfList<Tile, typename Expression::Operands>::Type;
    // Slices whose operands are prefetched, in up to 32 registers: a global load waits 1 to 2 us
    // for the TMA transfers in flight.
    static constexpr int kAhead = Fragments::kWords <= 8 ? 4 : Fragments::kWords <= 16 ? 2 : 1;
    // Number of the operand that TMA loads into the staging, like a residual (Residual), if
    // epilogue_kind is kTmaEpilogue; -1: none.
    static constexpr int kLoaded = kSwapAB ? -1 : Expression::Operands::first_short_matrix();
    static_assert(Rows::kCount == 0 || !kSwapAB, "a lane has columns of a row");

    const ExpressionOperands& operands;

    DEVICE ExpressionEpilogueSm90(const MatmulParams& params, const Arguments& arguments)
        : General(params, arguments), operands(arguments.operands) {
        this->is_tma_store = false;  // known at compile time
    }

    struct Consumer : General::Consumer {
        const ExpressionEpilogueSm90& whole;

        template <class Storage>
        DEVICE Consumer(const ExpressionEpilogueSm90& whole, Storage& storage, WorkTile& work,
                        int warp, int warpgroup)
            : General::Consumer(whole, storage, work, warp, warpgroup), whole(whole) {
            this->adds = kLoaded >= 0 && whole.params.epilogue_kind == kTmaEpilogue;
        }

        template <class Scheduler>
        DEVICE void store(const GemmWorkTile& tile, int count, const Accumulator& accumulator) {
            whole.store(tile, count, *this, accumulator);
        }
    };

    // Applies the formula to a lane's values in results[0].  (row, col): the slice's first element.
    // rows: reductions of the lane's two rows.
    DEVICE void apply(const ExpressionOperands& found, const Fragments& fragments, int row, int col,
                      Results& results, Rows (&rows)[2]) const {
        const int m = int(this->params.epilogue.m), n = int(this->params.epilogue.n);
        const int lane = Tile::lane();
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
            const int at_row = row + Tile::row_of_half(lane, v / 2 % 2),
                      at_col = col + wgmma_col(lane, v);
            const int i = kSwapAB ? at_col : at_row, j = kSwapAB ? at_row : at_col;
            float of_element[Expression::kResults];
            const FragmentElement<Fragments> x{fragments, found, v};
            Expression::of(x, results[0][v], i < m ? i : m - 1, j < n ? j : n - 1, found.matrix,
                           of_element);
            if (j < n) rows[v / 2 % 2].add(of_element);
#pragma unroll
            for (int r = 0; r < Expression::kResults; ++r) results[r][v] = of_element[r];
        }
    }
    // Stores a lane's values from the registers: in pairs where adjacent, 8-bit ones all together.
    template <class T>
    DEVICE void store_values(T* out, const MatrixStrides& strides, int row, int col,
                             const Values& values) const {
        const EpilogueParams& params = this->params.epilogue;
        if constexpr (sizeof(T) == 1 && !kSwapAB) {
            store_quad(out, params, strides, row, col, values);
            return;
        }
        const int lane = Tile::lane();
#pragma unroll
        for (int v = 0; v < kValues; v += 2) {
            const int at_row = row + Tile::row_of_half(lane, v / 2 % 2),
                      at_col = col + wgmma_col(lane, v);
            const int64_t i = kSwapAB ? at_col : at_row, j = kSwapAB ? at_row : at_col;
            T* first = out + i * strides.row + j * strides.col;
            if constexpr (kSwapAB) {  // a pair is a column of the output
                if (j >= params.n) continue;
                if (i < params.m) *first = from_float<T>(values[v]);
                if (i + 1 < params.m) first[strides.row] = from_float<T>(values[v + 1]);
            } else {
                const int64_t rest = i < params.m ? params.n - j : 0;
                const float pair[2] = {values[v], values[v + 1]};
                if (rest > 0) store_run(first, strides.col, rest > 1 ? 2 : 1, pair);
            }
        }
    }
    // Stores the results after the first.
    struct StoreMoreValues {
        const ExpressionEpilogueSm90& epilogue;
        const ExpressionOperands& found;
        int row, col;
        const Results& results;

        template <class T> DEVICE void store(int which, int k) const {
            const MatrixStrides strides{found.params.i_strides[k], found.params.j_strides[k]};
            epilogue.store_values(found.result<T>(k), strides, row, col, results[which]);
        }
    };
    DEVICE void store(const GemmWorkTile& tile, int count, Consumer& consumer,
                      const Accumulator& accumulator) const {
        const WorkTile& work = consumer.work;
        const bool loads = consumer.adds;
        const EpilogueParams params = without_addends(this->params.epilogue);
        const MatrixEpilogue all = this->of_matrix(tile);
        const MatrixEpilogue matrix{params, all.out, nullptr, nullptr, all.scale_a, all.scale_b};
        const ExpressionOperands found = operands.of_matrix(this->params.batch, tile.batch);
        const int batch = int(this->offset(tile, kOut));
        typename Ops::Broadcasts broadcasts;
        broadcasts.load(matrix, work.first_row, work.first_col);
        // This block's slices; its columns are slice `row_slice` of the row reductions.
        const typename Tile::OwnChunks own;
        constexpr int kOwn = own.kCount * Tile::kSlicesOfChunk;  // of 64 rows
        const auto slice_of = [&](int i) {
            return i / kOwn * kSlices + own.first * Tile::kSlicesOfChunk + i % kOwn;
        };
        const auto row_of = [&](int i) { return work.first_row + i / kOwn * 64; };
        const auto col_of = [&](int i) {
            return work.first_col + Tile::slice_col(slice_of(i) % kSlices);
        };
        const int row_slice = work.first_col / Tile::kOwnCols + own.first / own.kCount;
        const int m = int(params.m), n = int(params.n);
        Rows rows[2];
        Fragments ahead[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
            if (i < Tile::kMmasM * kOwn)
                ahead[i].load(found, row_of(i), col_of(i), m, n, loads ? kLoaded : -1);
#pragma unroll 1
        for (int i = 0; i < Tile::kMmasM * kOwn; ++i) {
            const int slice = slice_of(i), row = row_of(i), col = col_of(i);
            const int chunk = i / Tile::kSlicesOfChunk, of_chunk = i % Tile::kSlicesOfChunk;
            Fragments fragments = ahead[0];
#pragma unroll
            for (int j = 1; j < kAhead; ++j) ahead[j - 1] = ahead[j];
            if (const int next = i + kAhead; next < Tile::kMmasM * kOwn)
                ahead[kAhead - 1].load(found, row_of(next), col_of(next), m, n,
                                       loads ? kLoaded : -1);
            if constexpr (kLoaded >= 0) {
                if (loads) {
                    if (of_chunk == 0) consumer.residual.wait(count, chunk);
                    uint32_t words[kValues / 2];
                    StoreBox<Tile>::template move_slice<true>(consumer.residual.box(count, chunk),
                                                              of_chunk * Tile::kSlice, words);
                    fragments.template set<kLoaded>(words);
                }
            }
            Results results;
            Values& values = results[0];
            Ops::finish_slice(matrix, broadcasts, slice, row, col, accumulator, values);
            apply(found, fragments, row, col, results, rows);
            if (i % kOwn == kOwn - 1 && row_slice * Tile::kOwnCols < n)
                store_quad_rows(rows, found, row + Tile::lane() / 4, m - 1, row_slice);
            if constexpr (!kSame<Narrow, void>) {
                store_values(static_cast<Narrow*>(matrix.out), params.out, row, col, values);
            } else if (this->params.tma_stores) {
                StoreBox<Tile>::store_slice(consumer.staging, consumer.box, this->arguments.out_map,
                                            slice, row, col, batch, params.out_dtype, values);
                if (loads && of_chunk == Tile::kSlicesOfChunk - 1 && consumer.residual.loads())
                    consumer.residual.follow(count, chunk, work.first_row, work.first_col, 0);
            } else if (params.out_dtype == kFloat) {
                store_values(static_cast<float*>(matrix.out), this->params.epilogue.out, row, col,
                             values);
            } else if (params.out_dtype == kHalf) {
                store_values(static_cast<half*>(matrix.out), this->params.epilogue.out, row, col,
                             values);
            } else {
                store_values(static_cast<bf16*>(matrix.out), this->params.epilogue.out, row, col,
                             values);
            }
            Expression::for_each_more(StoreMoreValues{*this, found, row, col, results});
        }
    }
};

}  // namespace gemm
