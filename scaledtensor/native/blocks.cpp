// Casts under scales of blocks, for eager CPU tensors: the values of the codes, in one call.
//
// The arithmetic is that of `formats/blocks.py`, which is the reference: tests compare the bits of both. All of
// it is float64. A quotient is rounded to the grid of the format by adding and subtracting a number whose unit in
// the last place is the step of the grid, so that ties go to even.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "floats.h"
#include "threads.h"

// The fields are described in `blocks.py`.
struct Blocks {
    const void *x;
    void *y;
    float *scales;
    int64_t m, k, block;
    int32_t half_x, half_y, kind, whole, rows, signed_zero, mantissa, least, above, least_scale;
    int64_t carry;
    double largest, lowest, given;
};

namespace {

enum Kind { GIVEN = 0, RATIO = 1, POWER = 2, TWO_LEVEL = 3 };

constexpr double E4M3FN_MAX = 448, E4M3FN_TINY = 1.0 / 512;

inline double as_double(uint64_t x) { double y; std::memcpy(&y, &x, 8); return y; }
inline uint64_t as_bits(double x) { uint64_t y; std::memcpy(&y, &x, 8); return y; }
inline double power_of_two(int32_t e) { return as_double(uint64_t(e + 1023) << 52); }

struct Single {
    using Stored = float;
    static float load(float x) { return x; }
    static float store(float x) { return x; }
};

struct Half {
    using Stored = uint16_t;
    static float load(uint16_t x) { return wide(x); }
    static uint16_t store(float x) { return bfloat16(x); }
};

// The largest magnitude of elements. NaNs and infinities are larger than all numbers.
template <class F> inline float largest(const typename F::Stored *x, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t size = as_bits(F::load(x[i])) & 0x7FFFFFFF;
        most = size > most ? size : most;
    }
    return as_float(most);
}

// Whether no element is infinite or NaN. Nothing is measured.
template <class F> inline bool finite(const typename F::Stored *x, int64_t n) {
    uint32_t found = 0;
    for (int64_t i = 0; i < n; i++) found |= (as_bits(F::load(x[i])) & 0x7F800000) == 0x7F800000;
    return !found;
}

// The nearest number with `mantissa` bits after the leading one, and an exponent of at least that of `normal`.
inline double nearest(double size, double normal, double shift) {
    double power = as_double(as_bits(size) & 0x7FF0000000000000);
    power = power > normal ? power : normal;
    const double addend = power * shift;  // its unit in the last place is one step of the grid
    return size + addend - addend;
}

// `_least_above` of the reference: the least normal float32 that is not below amax / limit.
inline float least_above(double amax, double limit) {
    if (amax == 0) return 1;
    const float near = float(amax / limit);
    float least = near;
    if (double(near) * limit < amax) least = as_float(as_bits(near) + 1);
    const float low = std::numeric_limits<float>::min(), high = std::numeric_limits<float>::max();
    return least < low ? low : least > high ? high : least;
}

// `_exponent` of the reference.
inline float power_above(const Blocks &c, double amax) {
    if (amax == 0) return 1;
    int32_t e = int32_t((as_bits(amax) + uint64_t(c.carry)) >> 52) - c.above;
    e = e < c.least_scale ? c.least_scale : e > 127 ? 127 : e;
    return float(power_of_two(e));
}

inline double block_scale(const Blocks &c, double amax, double whole) {
    const double ratio = amax == 0 ? 1 : amax / (whole * c.largest);
    const double size = ratio < E4M3FN_TINY ? E4M3FN_TINY : ratio > E4M3FN_MAX ? E4M3FN_MAX : ratio;
    return nearest(size, 1.0 / 64, power_of_two(52 - 3));
}

template <class X, class Y>
inline void cast(const Blocks &c, const typename X::Stored *x, typename Y::Stored *y, int64_t n, double divisor,
                 double factor) {
    const double normal = power_of_two(c.least), shift = power_of_two(52 - c.mantissa);
    const double high = c.largest, low = c.lowest, zero = c.signed_zero ? -0.0 : 0.0;
    for (int64_t i = 0; i < n; i++) {
        const double q = double(X::load(x[i])) / divisor;
        const double clipped = q > high ? high : q < low ? low : q;
        const double size = nearest(std::fabs(clipped), normal, shift);
        y[i] = Y::store(float((std::copysign(size, q) + zero) * factor));
    }
}

template <class X, class Y> bool run(const Blocks &c, int threads) {
    const auto *x = static_cast<const typename X::Stored *>(c.x);
    auto *y = static_cast<typename Y::Stored *>(c.y);
    const bool given = c.kind == GIVEN;
    if (given && !finite<X>(x, c.m * c.k)) return false;
    const int64_t parts = (c.k + c.block - 1) / c.block;
    std::vector<float> amax(given ? 0 : c.m * parts);
    if (!given) in_parts(c.m, c.k, threads, [&](int64_t a, int64_t b) {
        for (int64_t i = a; i < b; i++)
            for (int64_t j = 0; j < parts; j++) {
                const int64_t at = j * c.block, n = at + c.block < c.k ? c.block : c.k - at;
                amax[i * parts + j] = largest<X>(x + i * c.k + at, n);
            }
    });
    float most = 0;
    for (const float size : amax) {
        if (!(size <= std::numeric_limits<float>::max())) return false;
        most = size > most ? size : most;
    }
    float whole = float(c.given);
    if (c.kind == TWO_LEVEL) whole = least_above(most, E4M3FN_MAX * c.largest);
    if (c.kind == RATIO && c.whole) whole = least_above(most, c.largest);
    if (c.kind == POWER && c.whole) whole = power_above(c, most);
    if (c.whole) c.scales[0] = whole;
    in_parts(c.m, c.k, threads, [&](int64_t a, int64_t b) {
        for (int64_t i = a; i < b; i++)
            for (int64_t j = 0; j < parts; j++) {
                const int64_t at = j * c.block, n = at + c.block < c.k ? c.block : c.k - at;
                const double size = given ? 0 : amax[i * parts + j];
                double divisor = whole, factor = 1;
                if (c.kind == TWO_LEVEL) {
                    factor = block_scale(c, size, whole);
                    divisor = factor * whole;
                } else if (!c.whole) {
                    divisor = c.kind == RATIO ? least_above(size, c.largest) : power_above(c, size);
                    if (c.rows) c.scales[i] = float(divisor);
                    else factor = divisor;
                }
                cast<X, Y>(c, x + i * c.k + at, y + i * c.k + at, n, divisor, factor);
            }
    });
    return true;
}

}  // namespace

// 0, and nothing written that counts, if an element is not a finite number.
extern "C" int scaledtensor_blocks(const Blocks *call, int threads) {
    if (call->half_x) return call->half_y ? run<Half, Half>(*call, threads) : run<Half, Single>(*call, threads);
    return call->half_y ? run<Single, Half>(*call, threads) : run<Single, Single>(*call, threads);
}
