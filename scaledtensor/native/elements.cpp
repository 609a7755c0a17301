// Elementwise work of eager training steps on a CPU, in one pass over memory.
//
// Each function has the operations of the rule that calls it, in their order. Without a library the
// rule runs them one by one in PyTorch.

#include <cstdint>
#include <vector>

#include "floats.h"
#include "threads.h"

namespace {

// Multiplies bfloat16 elements by a power of two, which adds to their exponents. A block with a result
// that has another exponent field, such as an infinity or a subnormal number, is multiplied as float32.
// `y` may be `x`.
void shifted(const uint16_t *x, uint16_t *y, float factor, int64_t a, int64_t b) {
    constexpr int64_t BLOCK = 256;
    const int32_t power = (as_int(factor) >> 23) - 127;
    const uint16_t added = uint16_t(power * 128);
    const uint16_t first = uint16_t(most(1, 1 - power)), last = uint16_t(least(254, 254 - power));
    const uint16_t span = uint16_t(last - first);
    const bool normal = power > -127 && first <= last;
    for (; a < b; a += BLOCK) {
        const int64_t end = b - a < BLOCK ? b : a + BLOCK;
        uint16_t other = !normal;
        for (int64_t i = a; i < end; i++) {
            const uint16_t size = x[i] & 0x7FFF, field = size >> 7;
            const uint16_t beyond = uint16_t(field - first) > span ? 0xFFFF : 0;
            other |= size == 0 ? 0 : beyond;
        }
        if (other) {
#pragma omp simd
            for (int64_t i = a; i < end; i++) y[i] = bfloat16(wide(x[i]) * factor);
        } else {
#pragma omp simd
            for (int64_t i = a; i < end; i++) {
                const uint16_t bits = x[i];
                y[i] = uint16_t(bits + ((bits & 0x7FFF) == 0 ? 0 : added));
            }
        }
    }
}

// The largest magnitude, and the sum of squares. Squares are float32 numbers, and so are the sums of a
// block. An infinity or a NaN shows in the largest magnitude.
template <class X> float magnitudes(const X *x, int64_t count, double *squares) {
    constexpr int64_t BLOCK = 1024;
    int32_t largest = 0;
    double total = 0;
    for (int64_t a = 0; a < count; a += BLOCK) {
        const int64_t end = a + BLOCK < count ? a + BLOCK : count;
        for (int64_t i = a; i < end; i++)
            largest = most(largest, as_int(wide(x[i])) & 0x7FFFFFFF);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = a; i < end; i++) sum += wide(x[i]) * wide(x[i]);
        total += sum;
    }
    *squares = total;
    return as_float(largest);
}

// The sum of squares in float64.
template <class X> double squares(const X *x, int64_t a, int64_t b) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = a; i < b; i++) sum += double(wide(x[i])) * double(wide(x[i]));
    return sum;
}

// The number of magnitudes up to `limit`, whose bits are compared.
template <class X> int64_t within(const X *x, int64_t count, float limit) {
    const int32_t last = as_int(limit);
    int64_t found = 0;
    for (int64_t a = 0; a < count; a += 4096) {
        const int64_t end = a + 4096 < count ? a + 4096 : count;
        int32_t few = 0;
        for (int64_t i = a; i < end; i++) few += (as_int(wide(x[i])) & 0x7FFFFFFF) <= last;
        found += few;
    }
    return found;
}

// Adds the rows of `N` columns in the order of torch's sum over rows (`multi_row_sum` in ATen's
// SumKernel.cpp): rows to a sum of `step` rows, such sums to a sum of `step` sums, and so on. `columns` is
// the distance of the rows.
template <int64_t N>
void column_sums(const uint16_t *x, float *y, int64_t rows, int64_t columns) {
    constexpr int LEVELS = 4;
    int digits = 0;
    while (int64_t(1) << digits < rows) digits++;
    const int power = most(4, digits / LEVELS);
    const int64_t step = int64_t(1) << power;
    float sums[LEVELS][N] = {};
    const auto add = [&](int level) {
        for (int64_t j = 0; j < N; j++) sums[level][j] += sums[level - 1][j];
    };
    int64_t i = 0;
    const auto add_rows = [&](int64_t end) {
        for (; i < end; i++, x += columns)
            for (int64_t j = 0; j < N; j++) sums[0][j] += wide(x[j]);
    };
    while (i + step <= rows) {
        add_rows(i + step);
        for (int level = 1; level < LEVELS; level++) {
            add(level);
            for (int64_t j = 0; j < N; j++) sums[level - 1][j] = 0;
            if (i & ((step - 1) << level * power)) break;
        }
    }
    add_rows(rows);
    for (int level = 1; level < LEVELS; level++)
        for (int64_t j = 0; j < N; j++) sums[0][j] += sums[level][j];
    for (int64_t j = 0; j < N; j++) y[j] = sums[0][j];
}

// Calls `call` with the elements of `x`, which are bfloat16 or float32.
template <class F> void with_elements(int half, const void *x, F call) {
    if (half)
        call(static_cast<const uint16_t *>(x));
    else
        call(static_cast<const float *>(x));
}

}  // namespace

// Multiplies elements by `factor`: of bfloat16 if `half`, and into bfloat16 if `halves`. The factor of
// bfloat16 into bfloat16 is a power of two. There are no loops of float32 into float32. `row` is the
// distance of the rows of the source in elements; the target has no gaps.
extern "C" void scaledtensor_scaled(int half, int halves, const void *source, void *target,
                                    float factor, int64_t rows, int64_t columns, int64_t row,
                                    int threads) {
    const auto run = [&](int64_t from, int64_t to, int64_t count) {
        if (half && halves) {
            shifted(static_cast<const uint16_t *>(source) + from,
                    static_cast<uint16_t *>(target) + to, factor, 0, count);
        } else if (half) {
            const uint16_t *__restrict x = static_cast<const uint16_t *>(source) + from;
            float *__restrict y = static_cast<float *>(target) + to;
            for (int64_t i = 0; i < count; i++) y[i] = wide(x[i]) * factor;
        } else {
            const float *__restrict x = static_cast<const float *>(source) + from;
            uint16_t *__restrict y = static_cast<uint16_t *>(target) + to;
            for (int64_t i = 0; i < count; i++) y[i] = bfloat16(x[i] * factor);
        }
    };
    if (rows == 1)
        in_parts(columns, 1, threads, [&](int64_t a, int64_t b) { run(a, a, b - a); });
    else
        in_parts(rows, columns, threads, [&](int64_t a, int64_t b) {
            for (; a < b; a++) run(a * row, a * columns, columns);
        });
}

// Writes x first + y second for bfloat16 elements. The factors are powers of two, or their negatives.
// x first is rounded to bfloat16, which changes subnormal numbers.
extern "C" void scaledtensor_total(const uint16_t *x, const uint16_t *y, uint16_t *out, float first,
                                   float second, int64_t count, int threads) {
    in_parts(count, 1, threads, [&](int64_t a, int64_t b) {
        if (first >= 1)
            for (int64_t i = a; i < b; i++) out[i] = bfloat16(wide(x[i]) * first + wide(y[i]) * second);
        else
            for (int64_t i = a; i < b; i++)
                out[i] = bfloat16(wide(bfloat16(wide(x[i]) * first)) + wide(y[i]) * second);
    });
}

// Rounds the rows of a product times `ratio` to bfloat16, in a float32 product itself if `out` is null.
// With `bias`, a row, the result is the rounded rows times `kept` plus the bias times `share`, as
// bfloat16. The product is float32, or bfloat16 if `half`.
extern "C" void scaledtensor_rounded_rows(int half, void *product, const float *bias, uint16_t *out,
                                          float ratio, float kept, float share, int64_t rows,
                                          int64_t columns, int threads) {
    in_parts(rows, columns, threads, [&](int64_t a, int64_t b) {
        const int64_t count = (b - a) * columns;
        if (!out) {
            float *x = static_cast<float *>(product) + a * columns;
            for (int64_t i = 0; i < count; i++) x[i] = wide(bfloat16(x[i] * ratio));
            return;
        }
        uint16_t *y = out + a * columns;
        with_elements(half, product, [&](auto *x) {
            x += a * columns;
            if (!bias)
                for (int64_t i = 0; i < count; i++) y[i] = bfloat16(wide(x[i]) * ratio);
            else
                for (; a < b; a++, x += columns, y += columns)
                    for (int64_t i = 0; i < columns; i++) {
                        const float rounded = wide(bfloat16(wide(x[i]) * ratio));
                        // `kept` is a power of two, so a factor of 1 or more rounds nothing.
                        const float base =
                            kept >= 1 ? rounded * kept : wide(bfloat16(rounded * kept));
                        y[i] = bfloat16(base + bias[i] * share);
                    }
        });
    });
}

// Calls `loop(a, b)` for parts of [0, count) and returns the sum of its numbers, in an order that does
// not depend on the number of threads.
template <class F> double sum_of_parts(int64_t count, int threads, F loop) {
    const int64_t parts = (count + GRAIN - 1) / GRAIN;
    std::vector<double> sums(static_cast<size_t>(parts));
    in_parts(parts, GRAIN, threads, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            const int64_t a = i * GRAIN, b = a + GRAIN < count ? a + GRAIN : count;
            sums[static_cast<size_t>(i)] = loop(a, b);
        }
    });
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
}

// Returns the largest magnitude of finite elements, else an infinity or a NaN.
extern "C" float scaledtensor_magnitudes(int half, const void *source, int64_t count, double *squares,
                                         int threads) {
    std::vector<float> largest(static_cast<size_t>((count + GRAIN - 1) / GRAIN));
    with_elements(half, source, [&](auto *x) {
        *squares = sum_of_parts(count, threads, [&](int64_t a, int64_t b) {
            double sum = 0;
            largest[static_cast<size_t>(a / GRAIN)] = magnitudes(x + a, b - a, &sum);
            return sum;
        });
    });
    int32_t most_of_all = 0;
    for (const float size : largest) most_of_all = most(most_of_all, as_int(size));
    return as_float(most_of_all);
}

// Returns the sum of squares in float64, where no square of a float32 overflows.
extern "C" double scaledtensor_squares(int half, const void *source, int64_t count, int threads) {
    double found = 0;
    with_elements(half, source, [&](auto *x) {
        found = sum_of_parts(count, threads, [&](int64_t a, int64_t b) { return squares(x, a, b); });
    });
    return found;
}

extern "C" int64_t scaledtensor_within(int half, const void *source, int64_t count, float limit) {
    int64_t found = 0;
    with_elements(half, source, [&](auto *x) { found = within(x, count, limit); });
    return found;
}

// Writes the sums of the columns of a bfloat16 matrix, which has a multiple of 32 columns.
extern "C" void scaledtensor_column_sums(const uint16_t *x, float *y, int64_t rows, int64_t columns,
                                         int threads) {
    constexpr int64_t FEW = 32, MANY = 128;
    in_parts(columns / FEW, rows * FEW, threads, [&](int64_t a, int64_t b) {
        int64_t j = a * FEW;
        for (; j + MANY <= b * FEW; j += MANY) column_sums<MANY>(x + j, y + j, rows, columns);
        for (; j < b * FEW; j += FEW) column_sums<FEW>(x + j, y + j, rows, columns);
    });
}
