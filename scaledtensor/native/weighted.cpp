// Weighted sums of rows, for attention of eager CPU tensors.
//
// THE ORDER OF ADDITIONS. For weights p and rows v[0], v[1], ..., v[k - 1],
//
//     y[j]  = fma(p[i], v[i][j], y[j])    for i = 0, 1, ..., k - 1, from y[j] = 0
//     total = total + p[i]                for i = 0, 1, ..., k - 1, from total = 0
//
// All of it is float32, and each `fma` rounds once. A weight of zero changes no bit, wherever it is. So a
// query has the same bits beside masked keys and without them.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "threads.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

// The fields are described in `weighted.py`.
struct Weighted {
    const float *p, *v;
    float *y, *total;
    int64_t batches, m, n, k;
    int64_t p_row, p_batch, v_row, v_batch;
};

namespace {

constexpr int ROWS = 4, LANES = 8, COLUMNS = 2 * LANES;

#if defined(__AVX2__) && defined(__FMA__)
using V = __m256;
inline V zero() { return _mm256_setzero_ps(); }
inline V load(const float *x) { return _mm256_loadu_ps(x); }
inline void store(float *x, V v) { _mm256_storeu_ps(x, v); }
inline V fma(float a, V b, V c) { return _mm256_fmadd_ps(_mm256_set1_ps(a), b, c); }
#else
struct V { float lane[LANES]; };
inline V zero() { return V{}; }
inline V load(const float *x) { V v; std::memcpy(&v, x, sizeof v); return v; }
inline void store(float *x, const V &v) { std::memcpy(x, &v, sizeof v); }
inline V fma(float a, const V &b, V c) {
    for (int j = 0; j < LANES; j++) c.lane[j] = std::fma(a, b.lane[j], c.lane[j]);
    return c;
}
#endif

// COLUMNS results of each of R rows of weights.
template <int R> void tile(const float *p, int64_t p_row, const float *v, int64_t v_row, int64_t k, float *y,
                           int64_t y_row) {
    V left[R], right[R];
    for (int r = 0; r < R; r++) left[r] = right[r] = zero();
    for (int64_t i = 0; i < k; i++) {
        const V a = load(v + i * v_row), b = load(v + i * v_row + LANES);
        for (int r = 0; r < R; r++) {
            const float weight = p[r * p_row + i];
            left[r] = fma(weight, a, left[r]);
            right[r] = fma(weight, b, right[r]);
        }
    }
    for (int r = 0; r < R; r++) {
        store(y + r * y_row, left[r]);
        store(y + r * y_row + LANES, right[r]);
    }
}

template <int R> void rows(const Weighted &w, int64_t batch, int64_t row) {
    const float *p = w.p + batch * w.p_batch + row * w.p_row, *v = w.v + batch * w.v_batch;
    float *y = w.y + (batch * w.m + row) * w.n, *total = w.total + batch * w.m + row;
    int64_t j = 0;
    for (; j + COLUMNS <= w.n; j += COLUMNS) tile<R>(p, w.p_row, v + j, w.v_row, w.k, y + j, w.n);
    for (; j < w.n; j++)
        for (int r = 0; r < R; r++) {
            float sum = 0;
            for (int64_t i = 0; i < w.k; i++) sum = std::fma(p[r * w.p_row + i], v[i * w.v_row + j], sum);
            y[r * w.n + j] = sum;
        }
    float sums[R] = {};
    for (int64_t i = 0; i < w.k; i++)
        for (int r = 0; r < R; r++) sums[r] += p[r * w.p_row + i];
    for (int r = 0; r < R; r++) total[r] = sums[r];
}

}  // namespace

extern "C" void scaledtensor_weighted(const Weighted *call, int threads) {
    const Weighted &w = *call;
    const int64_t groups = (w.m + ROWS - 1) / ROWS;
    in_parts(w.batches * groups, ROWS * w.k * w.n, threads, [&](int64_t a, int64_t b) {
        for (int64_t i = a; i < b; i++) {
            const int64_t batch = i / groups, row = i % groups * ROWS;
            if (row + ROWS <= w.m)
                rows<ROWS>(w, batch, row);
            else
                for (int64_t r = row; r < w.m; r++) rows<1>(w, batch, r);
        }
    });
}
