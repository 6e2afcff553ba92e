// How the portable main loop gets an operand's stages from global memory, one after the other along
// k: by OperandSource::load, or, into stages of a warp's own, by lanes that keep what stays the same of
// their addresses.
// Loads stages of an operand, one after the other along k, from k first_k on.
enum Loading { kByBlock, kByChunks, kScaledByChunks };
template <class Operand, int kLayout, int kOuterSize, Loading kLoading> struct StageLoader {
    const OperandSource& source;

    DEVICE StageLoader(const OperandSource& source, int64_t) : source(source) {}
    // Starts to load k [first_k, end_k), at most kStageK.
    DEVICE void start(typename Operand::Tile& tile, int64_t first_k, int64_t end_k) const {
        source.load<Operand, kLayout, kOuterSize>(tile, first_k, end_k);
    }
};
// Chunks that a lane copies for its warp, by few instructions: what stays the same of its addresses
// is worked out once.
template <class Operand, int kLayout, int kOuterSize>
struct StageLoader<Operand, kLayout, kOuterSize, kByChunks> {
    using T = typename Operand::Stored;
    using Tile = typename Operand::Tile;
    static constexpr int kChunks = Tile::kChunks, kPerChunk = 16 / int(sizeof(T));
    static constexpr int kAtOnce = kWarpSize / kChunks;  // lines
    static_assert(kAtOnce * kChunks == kWarpSize, "lanes share lines in whole");
    const T* next;  // this lane's first chunk of the next stage
    int64_t next_line, next_stage;
    int line, chunk, place, outer;

    DEVICE StageLoader(const OperandSource& source, int64_t first_k) {
        const int64_t line_stride = kLayout == kOuter ? source.k_stride : source.outer_stride;
        const int64_t k_step = kLayout == kOuter ? line_stride : 1;
        // Opaque, or the loop would work them out again.
        line = opaque(lane_id() / kChunks);
        chunk = lane_id() % kChunks;
        place = opaque(Tile::place(line, chunk));
        outer = opaque(clamp_to(source.outer, kOuterSize));
        next = static_cast<const T*>(source.data) + line * line_stride + chunk * kPerChunk +
               first_k * k_step;
        next_line = kAtOnce * line_stride;
        next_stage = kTileK * k_step;
    }
    // Of one stage after the other.
    DEVICE void start(Tile& tile, int64_t first_k, int64_t end_k) {
        const int64_t rest = end_k - first_k;
        const int num_k = rest < kStageK ? int(rest) : kStageK;
        const int lines = kLayout == kOuter ? num_k : outer;
        const int elements = kLayout == kOuter ? outer : num_k;
        if (num_k == kStageK && outer >= kOuterSize) {
            copy<true>(tile, lines, 16);
        } else {
            const int own = clamp_to(elements - chunk * kPerChunk, kPerChunk);
            copy<false>(tile, lines, opaque(own * int(sizeof(T))));
        }
        next += next_stage;
    }
    template <bool kWhole>
    DEVICE void copy(Tile& tile, int lines, int bytes) const {
        const T* from = next;
#pragma unroll
        for (int first = 0; first < Tile::kLines; first += kAtOnce, from += next_line) {
            if (Tile::kLines < kAtOnce && line >= Tile::kLines) break;
            // The bits of `line` are below those of `first`.
            void* to = &tile.chunks[(place ^ Tile::swizzle(first)) + first * kChunks];
            if constexpr (kWhole) copy_async<16>(to, from);
            else copy_async_part(to, from, first + line < lines ? bytes : 0);
        }
    }
};
// NVFP4's codes so, and the words of scales that are the lane's.
template <class Operand, int kLayout, int kOuterSize>
struct StageLoader<Operand, kLayout, kOuterSize, kScaledByChunks> {
    using Tile = typename Operand::Tile;
    using Codes = decltype(Tile::codes);
    static constexpr int kAtOnce = kWarpSize / Codes::kChunks;  // lines
    static constexpr int kLineWords = kStageK / kWordK, kWords = kOuterSize * kLineWords;
    static constexpr int kOwnWords = (kWords + kWarpSize - 1) / kWarpSize;
    const OperandSource& source;
    const uint8_t* next;  // this lane's first chunk of the next stage
    const e4m3* next_words[kOwnWords];
    int64_t next_line;
    int line, place, outer;
    bool aligned;

    DEVICE StageLoader(const OperandSource& source, int64_t first_k) : source(source) {
        const GroupScales& groups = source.groups;
        line = opaque(lane_id() / Codes::kChunks);
        place = opaque(Codes::place(line, lane_id() % Codes::kChunks));
        outer = opaque(clamp_to(source.outer, kOuterSize));
        const auto* codes = static_cast<const uint8_t*>(source.data);
        next = codes + line * source.outer_stride + lane_id() % Codes::kChunks * 16 + first_k / 2;
        next_line = kAtOnce * source.outer_stride;
        aligned = (uintptr_t(codes) | uintptr_t(source.outer_stride)) % 16 == 0 &&
                  (uintptr_t(groups.scales) | uintptr_t(groups.block) | uintptr_t(groups.quarter) |
                   uintptr_t(groups.row)) %
                          kWord ==
                      0;
#pragma unroll
        for (int i = 0; i < kOwnWords; ++i) {
            const int own = lane_id() + i * kWarpSize;
            next_words[i] = groups.at(source.first_outer + own / kLineWords,
                                      first_k + own % kLineWords * kWordK);
        }
    }
    DEVICE void start(Tile& tile, int64_t first_k, int64_t end_k) {
        if (end_k - first_k >= kStageK && aligned) {
            const uint8_t* from = next;
#pragma unroll
            for (int first = 0; first < Codes::kLines; first += kAtOnce, from += next_line) {
                if (Codes::kLines < kAtOnce && line >= Codes::kLines) break;
                void* to =
                    &tile.codes.chunks[(place ^ Codes::swizzle(first)) + first * Codes::kChunks];
                copy_async<16>(to, from, first + line < outer);
            }
#pragma unroll
            for (int i = 0; i < kOwnWords; ++i) {
                const int own = lane_id() + i * kWarpSize;
                if (kWords % kWarpSize != 0 && own >= kWords) break;
                copy_async<kWord>(&tile.words[own / kLineWords][own % kLineWords], next_words[i],
                                  own / kLineWords < outer);
            }
        } else {
            source.load<Operand, kLayout, kOuterSize>(tile, first_k, end_k);
        }
        next += kTileK / 2;
#pragma unroll
        for (int i = 0; i < kOwnWords; ++i) next_words[i] += kTileK / kWordK * source.groups.word;
    }
};
template <class Operand, class Element, int kLayout, int kOuterSize>
using LoaderOf = StageLoader<Operand, kLayout, kOuterSize,
                             !kOwnStages || kLayout == kStrided ? kByBlock
                             : kScaled<Element>                 ? kScaledByChunks
                                                                : kByChunks>;
