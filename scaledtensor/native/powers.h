// Scales of the host, which are powers of two: the arithmetic of `scales/powers.py`.

#pragma once

#include <cmath>
#include <cstdint>

namespace {

constexpr double MIN_SCALE = 0x1p-126, MAX_SCALE = 0x1p127, F32_MAX = 0x1.fffffep+127;
constexpr int32_t SQRT2_MANTISSA = 0x003504F3;
constexpr double LEAST_TO_ROUND_UP = SQRT2_MANTISSA * 0x1p-149;
constexpr double ROOT_HALF = (8388608 + SQRT2_MANTISSA) / 16777216.0;

// A number rounded to float32.
inline double single(double x) { return double(float(x)); }

// The power of two nearest to a float32 number in the log domain.
inline double power_of_two_near(double rms) {
    if (!(MIN_SCALE < rms && rms < MAX_SCALE)) {
        if (rms <= MIN_SCALE) return rms >= LEAST_TO_ROUND_UP ? MIN_SCALE : 1.0;
        return rms == rms ? MAX_SCALE : 1.0;
    }
    int exponent;
    const double significand = std::frexp(rms, &exponent);
    const double power = std::ldexp(1.0, exponent - (significand < ROOT_HALF));
    return power > MIN_SCALE ? power : MIN_SCALE;
}

}  // namespace
