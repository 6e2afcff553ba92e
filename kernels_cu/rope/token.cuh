// Tokens of a block: the places of their keys and values in the cache, and their angles.
//
// Constants: kTokens (tokens per block).
#pragma once
#include "rope/head_vector.cuh"

namespace rope {

// A token: its sequence and its index in the sequence.
struct Token {
    int32_t sequence, number;

    Token() = default;
    DEVICE Token(const RopeParams& p, int token) {
        sequence = token;
        number = p.seq_len.divide(sequence);
    }
    DEVICE Token next(const RopeParams& p) const {
        const bool is_last = number + 1 == p.seq_len.divisor;
        Token found;
        found.sequence = is_last ? sequence + 1 : sequence;
        found.number = is_last ? 0 : number + 1;
        return found;
    }
    DEVICE int position(const RopeParams& p, const int* positions) const {
        return positions[sequence * p.position_strides[0] + number * p.position_strides[1]];
    }
};

// A block's tokens from `first` on: how many there are, and their indices.
DEVICE int tokens_from(const RopeParams& p, int first) {
    const int left = p.num_tokens - first;
    return left < kTokens ? left : kTokens;
}
DEVICE void find_tokens(const RopeParams& p, int first, Token (&tokens)[kTokens]) {
    tokens[0] = Token(p, first);
#pragma unroll
    for (int i = 1; i < kTokens; ++i) tokens[i] = tokens[i - 1].next(p);
}

// Where a token's keys and values go: a slot of the cache, or the token's own place in k_out and
// v_out.
struct Slot {
    int32_t page, number;  // page: the sequence if the cache is contiguous
    int32_t exists;

    Slot() = default;  // trivial, because slots are in shared memory
    DEVICE Slot(const RopeParams& p, const Token& token, const int* block_table, int position) {
        page = token.sequence, number = p.has_cache ? position : token.number;
        exists = !p.has_cache || (position >= 0 && position < p.num_slots);
        if (p.page_size.divisor == 0 || !exists) return;
        int index = position;
        number = p.page_size.divide(index);
        page = block_table[token.sequence * p.table_strides[0] + index * p.table_strides[1]];
        exists = page >= 0 && page < p.num_pages;
    }
};

// Finds the slots and angles of the block's tokens.  Called by all threads.
DEVICE void fill_tokens(const RopeParams& p, Slot (&slots)[kTokens], const Tables& tables,
                        int first_token, int num_tokens, const int* positions,
                        const float* rotation, const int* block_table) {
    if (int(threadIdx.x) < num_tokens) {
        const Token own(p, first_token + int(threadIdx.x));
        slots[threadIdx.x] = Slot(p, own, block_table, own.position(p, positions));
    }
    // From the last thread on: the first threads are busy with slots.
    const int num_angles = num_tokens * p.half.divisor;
    for (int i = kNumThreads - 1 - int(threadIdx.x); i < num_angles; i += kNumThreads) {
        int number = kTokens > 1 ? i : 0;
        const int pair = kTokens > 1 ? p.half.divide(number) : i;
        const int turns = Token(p, first_token + number).position(p, positions);
        tables.fill_angle(p, rotation, number, pair, turns);
    }
}

}  // namespace rope
