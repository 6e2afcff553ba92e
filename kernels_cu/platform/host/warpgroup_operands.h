// Operands of warpgroup_mma.h, located by the bits of their descriptors, and their products.
#pragma once
#include <stdint.h>
#include <string.h>

#include "platform/host/products.h"
#include "platform/host/transfers.h"

namespace host {
namespace {

constexpr int kTileRows = 64;
constexpr int kTileBytes = 32;  // along K
constexpr int kMaxN = 256;

bool is_int(const Wgmma& op) { return op.types[0] == kInt8; }
int row_of(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
int col_of(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

// --- operands --------------------------------------------------------------------------------
int num_units(const Wgmma& op, int operand) {
    if (operand == 0) return op.a_registers ? 0 : 2 * kTileRows;
    return 2 * op.n;
}

// Address of 16 bytes of a tile.  K-major: half `unit % 2` of row `unit / 2`; MN-major: 8 rows from
// 8 * (unit / 16) on, at `unit % 16` along K.
const unsigned char* unit_address(const Block& block, const Wgmma& op, int operand, int unit,
                                  Location location) {
    const unsigned long long tile = op.tiles[operand];
    const unsigned leading = unsigned(tile >> 16 & 0x3fff) << 4;
    const unsigned stride = unsigned(tile >> 32 & 0x3fff) << 4;
    const int swizzle_modes[] = {0, 128, 64, 32};
    const unsigned span = swizzle_modes[tile >> 62];
    if (tile >> 49 & 7) fail_at("wgmma: descriptors have base offset 0", location);
    unsigned address = unsigned(tile & 0x3fff) << 4;
    if (!op.mn_major[operand]) {
        const unsigned row = unit / 2, half = unit % 2;
        address += span == 0 ? row % 8 * 16 + row / 8 * stride + half * leading
                             : row % 8 * span + row / 8 * stride + half * 16;
    } else {
        const unsigned line = unit / 16, k = unit % 16;
        address += span == 0 ? line * stride + k % 8 * 16 + k / 8 * leading
                             : line % (span / 16) * 16 + line / (span / 16) * leading +
                                   k % 8 * span + k / 8 * stride;
    }
    address = unsigned(swizzled(address, span)) & 0x3ffff;
    const Cluster& c = worker->cluster;
    if (address + 16 > c.dynamic_bytes) {
        fail_at("wgmma: a tile reaches past the dynamic shared memory", location);
    }
    const char* dynamic = block.shared + kDynamicOffset;
    return reinterpret_cast<const unsigned char*>(dynamic + address);
}

unsigned shared_address(const void* p) {
    const char* dynamic = worker->current->owner->shared + kDynamicOffset;
    const size_t offset = static_cast<const char*>(p) - dynamic;
    if (offset >= worker->cluster.dynamic_bytes) {
        fail_at("wgmma's tiles are in the block's SHARED_STORAGE", {"matrix_descriptor", 0});
    }
    return unsigned(offset);
}

// Copies the operand's rows, kTileBytes each, to `image`.  Returns a checksum of the bytes.
unsigned long long read_operand(const Block& block, const Wgmma& op, int operand,
                                unsigned char* image, Location location) {
    unsigned long long checksum = 0;
    for (int unit = 0; unit < num_units(op, operand); ++unit) {
        const unsigned char* from = unit_address(block, op, operand, unit, location);
        unsigned long long words[2];
        memcpy(words, from, 16);
        checksum = (checksum ^ words[0]) * 0x9e3779b97f4a7c15;
        checksum = (checksum ^ checksum >> 29 ^ words[1]) * 0xbf58476d1ce4e5b9;
        if (!op.mn_major[operand]) {
            memcpy(image + unit * 16, from, 16);
        } else {
            for (int i = 0; i < 8; ++i) {
                memcpy(image + (unit / 16 * 8 + i) * kTileBytes + unit % 16 * 2, from + 2 * i, 2);
            }
        }
    }
    return checksum;
}

unsigned long long read_operands(const Block& block, const Wgmma& op, unsigned char* a,
                                 unsigned char* b, Location location) {
    const unsigned long long checksum = read_operand(block, op, 0, a, location);
    return checksum * 3 + read_operand(block, op, 1, b, location);
}

template <class T>
T decode(ElementType type, const unsigned char* p) {
    uint16_t code;
    memcpy(&code, p, item_bytes(type));
    if (type == kHalf) return T(to_float(half{code}));
    if (type == kBf16) return T(to_float(bf16{code}));
    if (type == kE4m3) return T(to_float(e4m3{uint8_t(code)}));
    if (type == kE5m2) return T(to_float(e5m2{uint8_t(code)}));
    return T(int8_t(code));
}

template <class T>
void multiply_tiles(const Wgmma& op, const unsigned char* a_image, const unsigned char* b_image,
                    T* d) {
    // Too large for a fiber's stack; no switch happens meanwhile.
    static thread_local T a[kTileRows * kTileBytes], b[kTileBytes * kMaxN];
    const int k = kTileBytes / item_bytes(op.types[0]), size = item_bytes(op.types[0]);
    for (int i = 0; i < kTileRows * k; ++i) a[i] = decode<T>(op.types[0], a_image + i * size);
    for (int col = 0; col < op.n; ++col) {
        for (int i = 0; i < k; ++i) {
            b[i * op.n + col] = decode<T>(op.types[1], b_image + (col * k + i) * size);
        }
    }
    if (!op.accumulate) memset(d, 0, kTileRows * op.n * sizeof(T));
    multiply(op.types, d, a, b, kTileRows, op.n, k);
}

}  // namespace
}  // namespace host
