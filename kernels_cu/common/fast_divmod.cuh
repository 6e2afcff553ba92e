// Division of an integer from 0 to 2^31 - 1 by a multiplication.  reciprocal: (2^32 - 1) / divisor,
// rounded down.
#pragma once
struct FastDivmod {
    int32_t divisor;
    uint32_t reciprocal;

    // x becomes the quotient; returns the remainder.
    DEVICE int divide(int& x) const {
        // At most 1 too small: 2^32 / divisor exceeds `reciprocal` by less than 1 + 1 / divisor.
        int quotient = int(uint64_t(uint32_t(x)) * reciprocal >> 32);
        int remainder = x - quotient * divisor;
        if (remainder >= divisor) ++quotient, remainder -= divisor;
        x = quotient;
        return remainder;
    }
};
