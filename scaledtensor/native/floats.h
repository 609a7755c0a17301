// The bits of float32 numbers, and rounding to bfloat16.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline float as_float(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
inline float as_float(int32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
inline uint32_t as_bits(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }
inline int32_t as_int(float x) { int32_t y; std::memcpy(&y, &x, 4); return y; }
inline int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
inline int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

// The value of a bfloat16, and of a float32 number.
inline float wide(float x) { return x; }
inline float wide(uint16_t x) { return as_float(uint32_t(x) << 16); }

// Rounds to the nearest bfloat16, ties to even. Every NaN becomes the same NaN, as in PyTorch.
inline uint16_t bfloat16(float x) {
    const uint32_t bits = as_bits(x);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return uint16_t((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

}  // namespace
