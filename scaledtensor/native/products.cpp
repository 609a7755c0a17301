// Products of float rows with rows of codes, for eager CPU tensors. The codes are decoded in registers.
//
// THE ORDER OF ADDITIONS. For a row x and a row w of values, both of K elements,
//
//     lane[j] = fma(x[k], w[k], lane[j])    for j = k mod 8, k = 0, 1, ..., K - 1, from lane[j] = 0
//     s[j] = lane[j] + lane[j + 4]          for j = 0, 1, 2, 3
//     sum = ((s[0] + s[2]) + (s[1] + s[3])) + 0
//     y = sum * factor                      factor = scale * whole, one rounding
//
// All of it is float32. Each `fma` rounds once; it rounds nothing more than an addition does if the
// product x[k] * w[k] is a float32 itself. A scale for each block of a row belongs to the values,
// w[k] = code * scale with one rounding, and `factor` is `whole` alone. The last step adds +0, so that no
// sum is -0. Zeros that follow the last element change no lane. Hence a result depends on its two
// rows alone, not on the other rows, the number of threads or the vectors of the CPU.
//
// Decoders may give values times 2^-shift, and x is then multiplied by 2^shift beforehand. Both are
// exact, so every product is the same. Only a code times its block's scale below 2^-112 may lose bits.
// Rows with an x of 2^100 or more meet values from a table, which have no shift.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "decoders.h"
#include "floats.h"
#include "threads.h"

// The fields are described in `products.py`.
struct Product {
    const void *x;
    const uint8_t *codes;
    const void *scale;
    const float *table;
    void *y;
    int64_t batches, m, n, k;
    int64_t x_row, x_batch, w_row, w_batch;  // of x in elements, of the codes in bytes
    int64_t block, rows, scale_row;
    int32_t kind, bits, half, scale_kind;
    float whole;
};

namespace {

enum ScaleKind { NONE, SINGLE, POWER, SHORT };  // float32, E8M0, E4M3FN

// --- a call ----------------------------------------------------------------------------------

struct Call : Product {
    const float *rows_of_x;  // float32 times 2^shift; zeros fill a row to a multiple of 32
    int64_t row_of_x, batch_of_x;
    int64_t chunks;  // of a row, without a last one that is shorter
    int64_t blocks;  // of a row, each with a scale; 0 if scales do not belong to the values
    int shift;       // half chunk i has the scale i >> shift
    float values[256], powers[256];  // of codes, times 2^-shift, and of scales in 8 bits
};

inline float scale_at(const Call &c, int64_t i) {
    if (c.scale_kind == NONE) return 1.0f;
    if (c.scale_kind == SINGLE) return static_cast<const float *>(c.scale)[i];
    return c.powers[static_cast<const uint8_t *>(c.scale)[i]];
}

inline float factor(const Call &c, int64_t n) {
    return c.blocks ? c.whole : scale_at(c, n / c.rows * c.scale_row) * c.whole;
}

// The scales of a row's blocks, and 0 for a half chunk beyond K.
inline void scales_of(const Call &c, int64_t n, float *scales) {
    const int64_t first = n / c.rows * c.scale_row;
    int64_t i = 0;
#ifdef VECTORS
    const uint8_t *codes = static_cast<const uint8_t *>(c.scale) + first;
    if (c.scale_kind == POWER)
        for (; i + 8 <= c.blocks; i += 8) {
            const __m256i code = _mm256_cvtepu8_epi32(eight(codes + i));
            const __m256i nan = _mm256_cmpeq_epi32(code, _mm256_set1_epi32(255));
            const __m256i power = _mm256_max_epi32(_mm256_slli_epi32(code, 23), one_bit(22));
            store(scales + i, _mm256_castsi256_ps(_mm256_or_si256(
                                  power, _mm256_and_si256(nan, one_bit(22)))));
        }
    if (c.scale_kind == SHORT)
        for (; i + 8 <= c.blocks; i += 8) {
            const __m128i code = eight(codes + i);
            const __m128i size = _mm_and_si128(code, _mm_set1_epi8(0x7F));
            const __m256i nan =
                _mm256_cvtepi8_epi32(_mm_cmpeq_epi8(size, _mm_set1_epi8(0x7F)));
            const V value = times(_mm256_cvtph_ps(fine_half(_mm_cvtepi8_epi16(code))), all(256.0f));
            store(scales + i, _mm256_or_ps(value, _mm256_castsi256_ps(nan)));
        }
#endif
    if (c.scale_kind == SINGLE)
        std::memcpy(scales, static_cast<const float *>(c.scale) + first, size_t(c.blocks) * 4);
    else
        for (; i < c.blocks; i++) scales[i] = scale_at(c, first + i);
    scales[c.blocks] = 0.0f;
}

inline void put(const Call &c, int64_t batch, int64_t m, int64_t n, float y) {
    const int64_t at = (batch * c.m + m) * c.n + n;
    if (c.half)
        static_cast<uint16_t *>(c.y)[at] = bfloat16(y);
    else
        static_cast<float *>(c.y)[at] = y;
}

// The values of one chunk of a row: codes times scales.
template <class D, bool SCALED>
inline void values_of(D &decoder, const uint8_t *codes, int64_t chunk, const float *scales,
                      int shift, V *w) {
    decoder.decode(codes, w);
    if (SCALED) {
        const V a = all(scales[(2 * chunk) >> shift]);
        const V b = shift ? a : all(scales[2 * chunk + 1]);
        for (int i = 0; i < 4; i++) w[i] = times(w[i], i < 2 ? a : b);
    }
}

// A last chunk that is shorter, with codes 0 behind it. Every format has the value 0 there.
struct Tail {
    uint8_t codes[4 * CHUNK] = {};
    Tail(const Call &c, const uint8_t *row) {
        const int64_t done = c.chunks * c.bits * 4;
        std::memcpy(codes, row + done, size_t((c.k * c.bits + 7) / 8 - done));
    }
};

inline bool has_tail(const Call &c) { return c.chunks * CHUNK < c.k; }

// --- up to four rows of x: decoded values stay in registers ----------------------------------

// The rows m to m + M - 1 of x with the rows n to n + N - 1 of the codes. A row beyond the last one is
// the last one, and its result is not written. Returns false if the decoder failed.
template <class D, bool SCALED, int M, int N>
bool tile(const Call &c, int64_t batch, int64_t m, int64_t n, int64_t end, float *scales) {
    const float *x[M];
    const uint8_t *w[N];
    V lanes[M][N];
    const int64_t step = c.bits * 4, stride = c.blocks + 1;
    D decoder({c.kind, c.bits, c.values});
    for (int i = 0; i < M; i++) {
        const int64_t row = m + i < c.m ? m + i : c.m - 1;
        x[i] = c.rows_of_x + batch * c.batch_of_x + row * c.row_of_x;
    }
    for (int j = 0; j < N; j++) {
        const int64_t row = n + j < end ? n + j : end - 1;
        w[j] = c.codes + batch * c.w_batch + row * c.w_row;
        if (SCALED) scales_of(c, row, scales + j * stride);
        for (int i = 0; i < M; i++) lanes[i][j] = zero();
    }
    const auto add = [&](int j, const uint8_t *codes, int64_t chunk) {
        V values[4];
        values_of<D, SCALED>(decoder, codes, chunk, scales + j * stride, c.shift, values);
        for (int q = 0; q < 4; q++)
            for (int i = 0; i < M; i++)
                lanes[i][j] = fma(load(x[i] + chunk * CHUNK + 8 * q), values[q], lanes[i][j]);
    };
    for (int64_t chunk = 0; chunk < c.chunks; chunk++)
        for (int j = 0; j < N; j++) {
            // The hardware does not foresee a row of codes, which is often one page of memory.
            __builtin_prefetch(w[j] + chunk * step + 2 * N * c.w_row, 0, 2);
            add(j, w[j] + chunk * step, chunk);
        }
    if (has_tail(c))
        for (int j = 0; j < N; j++) add(j, Tail(c, w[j]).codes, c.chunks);
    if (decoder.failed()) return false;
    for (int j = 0; j < N && n + j < end; j++) {
        const float by = factor(c, n + j);
        for (int i = 0; i < M && m + i < c.m; i++)
            put(c, batch, m + i, n + j, sum(lanes[i][j]) * by);
    }
    return true;
}

template <class D, bool SCALED, int M, int N>
void few(const Call &c, int64_t batch, int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> scales(new float[N * (c.blocks + 1)]);
    for (int64_t n = begin; n < end; n += N)
        for (int64_t m = 0; m < c.m; m += M)
            if (!tile<D, SCALED, M, N>(c, batch, m, n, end, scales.get()))
                tile<Table, SCALED, M, N>(c, batch, m, n, end, scales.get());
}

// --- more rows of x: decoded values go to memory of the first caches -------------------------

constexpr int64_t ROWS = 128, COLUMNS = 48, DEPTH = 256;  // of x, of the codes, and along K
constexpr int HIGH = 4, WIDE = 3;                         // a tile whose lanes are registers
constexpr int64_t STRIDE = DEPTH + 16;  // no power of two, whose rows share lines of a cache

template <class D, bool SCALED>
bool decoded(const Call &c, const uint8_t *row, int64_t first, int64_t last, const float *scales,
             float *out) {
    D decoder({c.kind, c.bits, c.values});
    for (int64_t chunk = first; chunk < last; chunk++, out += CHUNK) {
        V values[4];
        for (int64_t line = 0; line < c.bits * 4; line += 64)
            __builtin_prefetch(row + c.w_row + chunk * c.bits * 4 + line, 0, 2);
        if (chunk < c.chunks)
            values_of<D, SCALED>(decoder, row + chunk * c.bits * 4, chunk, scales, c.shift, values);
        else
            values_of<D, SCALED>(decoder, Tail(c, row).codes, chunk, scales, c.shift, values);
        for (int q = 0; q < 4; q++) store(out + 8 * q, values[q]);
    }
    return !decoder.failed();
}

// `lanes` has eight numbers for each of HIGH x WIDE results, which this starts or continues.
inline void multiply(const float *const *x, const float *w, int64_t depth, bool start,
                     float *lanes) {
    V sums[HIGH][WIDE];
    for (int i = 0; i < HIGH; i++)
        for (int j = 0; j < WIDE; j++)
            sums[i][j] = start ? zero() : load(lanes + 8 * (i * WIDE + j));
    for (int64_t k = 0; k < depth; k += 8) {
        const V a = load(w + k), b = load(w + STRIDE + k), d = load(w + 2 * STRIDE + k);
        for (int i = 0; i < HIGH; i++) {
            const V row = load(x[i] + k);
            sums[i][0] = fma(row, a, sums[i][0]);
            sums[i][1] = fma(row, b, sums[i][1]);
            sums[i][2] = fma(row, d, sums[i][2]);
        }
    }
    for (int i = 0; i < HIGH; i++)
        for (int j = 0; j < WIDE; j++) store(lanes + 8 * (i * WIDE + j), sums[i][j]);
}

struct Memory {
    float w[COLUMNS * STRIDE], lanes[8 * ROWS * COLUMNS];
};

template <class D, bool SCALED>
void many(const Call &c, int64_t batch, int64_t begin, int64_t end) {
    static thread_local std::unique_ptr<Memory> memory;  // fresh pages take as long as a small call
    if (!memory) memory.reset(new Memory);
    const int64_t stride = c.blocks + 1, chunks = c.chunks + has_tail(c);
    const std::unique_ptr<float[]> scales(new float[COLUMNS * stride]);
    for (int64_t n = begin; n < end; n += COLUMNS) {
        const int64_t columns = n + COLUMNS < end ? COLUMNS : end - n;
        float factors[COLUMNS];
        for (int64_t j = 0; j < columns; j++) {
            factors[j] = factor(c, n + j);
            if (SCALED) scales_of(c, n + j, scales.get() + j * stride);
        }
        for (int64_t m = 0; m < c.m; m += ROWS) {
            const int64_t rows = m + ROWS < c.m ? ROWS : c.m - m;
            for (int64_t first = 0; first < chunks; first += DEPTH / CHUNK) {
                const int64_t last = first + DEPTH / CHUNK < chunks ? first + DEPTH / CHUNK : chunks;
                for (int64_t j = 0; j < columns; j++) {
                    const uint8_t *row = c.codes + batch * c.w_batch + (n + j) * c.w_row;
                    const float *own = scales.get() + j * stride;
                    float *out = memory->w + j * STRIDE;
                    if (!decoded<D, SCALED>(c, row, first, last, own, out))
                        decoded<Table, SCALED>(c, row, first, last, own, out);
                }
                for (int64_t i = 0; i < rows; i += HIGH) {
                    const float *x[HIGH];
                    for (int64_t h = 0; h < HIGH; h++) {
                        const int64_t row = i + h < rows ? m + i + h : m + rows - 1;
                        x[h] = c.rows_of_x + batch * c.batch_of_x + row * c.row_of_x + first * CHUNK;
                    }
                    // Columns beyond the last one have old numbers, whose results are not read.
                    for (int64_t j = 0; j < columns; j += WIDE)
                        multiply(x, memory->w + j * STRIDE, (last - first) * CHUNK, first == 0,
                                 memory->lanes + 8 * (i * COLUMNS + j * HIGH));
                }
            }
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < columns; j++) {
                    const int64_t tile = i / HIGH * HIGH * COLUMNS + j / WIDE * WIDE * HIGH;
                    const int64_t at = tile + i % HIGH * WIDE + j % WIDE;
                    put(c, batch, m + i, n + j, sum(load(memory->lanes + 8 * at)) * factors[j]);
                }
        }
    }
}

// Subnormal numbers count, whatever `torch.set_flush_denormal` chose for a thread.
struct Subnormals {
    Subnormals(const Subnormals &) = delete;
#ifdef VECTORS
    const unsigned before = _mm_getcsr();
    Subnormals() { _mm_setcsr(before & ~0x8040u); }
    ~Subnormals() { _mm_setcsr(before); }
#else
    Subnormals() {}
    ~Subnormals() {}
#endif
};

// --- the choice ------------------------------------------------------------------------------

using Loop = void (*)(const Call &, int64_t, int64_t, int64_t);

template <class D, bool SCALED> Loop loop_of(int64_t m) {
    return m == 1   ? few<D, SCALED, 1, 4>
           : m == 2 ? few<D, SCALED, 2, 4>
           : m <= 4 ? few<D, SCALED, 4, 2>
                    : many<D, SCALED>;
}

template <class D> Loop chosen(const Call &c) {
    return c.blocks ? loop_of<D, true>(c.m) : loop_of<D, false>(c.m);
}

Loop chosen(const Call &c) {
    switch (c.kind) {
    case FP32: return loop_of<Single, false>(c.m);
    case BF16: return loop_of<Brain, false>(c.m);
    case E4M3: return chosen<Fine>(c);
    case E5M2: return chosen<Coarse>(c);
    case INT8: return chosen<Integer>(c);
    case FOUR: return chosen<Four>(c);
    case E3M2:
    case E2M3: return chosen<Six>(c);
    default: return chosen<Table>(c);
    }
}

// --- x ---------------------------------------------------------------------------------------

// Writes a row of x times `power` as float32. Returns whether a finite number is 2^100 or more.
inline bool wide_row(const Product &p, const void *x, int64_t at, float power, float *out) {
    int large = 0;
    const auto write = [&](int64_t k, float value) {
        const uint32_t size = as_bits(value) & 0x7FFFFFFF;
        large |= (size >= 0x71800000) & (size < 0x7F800000);
        out[k] = value * power;
    };
    if (p.half)
        for (int64_t k = 0; k < p.k; k++)
            write(k, wide(static_cast<const uint16_t *>(x)[at + k]));
    else
        for (int64_t k = 0; k < p.k; k++) write(k, static_cast<const float *>(x)[at + k]);
    return large;
}

// Copies all rows of x, each filled with zeros to `row` numbers.
bool wide_rows(const Product &p, float power, int64_t row, float *out, int threads) {
    bool large = false;
    in_parts(p.batches * p.m, row, threads, [&](int64_t a, int64_t b) {
        const Subnormals counted;
        bool found = false;
        for (int64_t i = a; i < b; i++) {
            const int64_t at = i / p.m * p.x_batch + i % p.m * p.x_row;
            found |= wide_row(p, p.x, at, power, out + i * row);
            for (int64_t k = p.k; k < row; k++) out[i * row + k] = 0.0f;
        }
        if (found) {
#pragma omp atomic write
            large = true;
        }
    });
    return large;
}

float power_of_two(int code) {  // a scale in E8M0
    return as_float(code == 255 ? 0x7FC00000u : code ? uint32_t(code) << 23 : 1u << 22);
}

float fine_scale(int code) {  // a scale in E4M3FN
    const int size = code & 0x7F, exponent = size >> 3, mantissa = size & 7;
    if (size == 0x7F) return as_float(0x7FC00000u);
    const float value = exponent ? std::ldexp(float(8 + mantissa), exponent - 10)
                                 : std::ldexp(float(mantissa), -9);
    return code & 0x80 ? -value : value;
}

}  // namespace

extern "C" void scaledtensor_product(const Product *product, int threads) {
    Call c{};
    static_cast<Product &>(c) = *product;
    c.chunks = c.k / CHUNK;
    c.blocks = c.block ? (c.k + c.block - 1) / c.block : 0;
    while (c.block && c.blocks > 1 && CHUNK / 2 << c.shift < c.block) c.shift++;
    if (c.blocks == 1) c.shift = 62;
    const int64_t row = (c.k + CHUNK - 1) / CHUNK * CHUNK, rows = c.batches * c.m;
    int shift = shift_of(c.kind);
    constexpr int64_t KEPT = 1 << 18;  // a copy of that size stays in memory
    static thread_local std::unique_ptr<float[]> kept;
    std::unique_ptr<float[]> large;
    c.rows_of_x = static_cast<const float *>(c.x);
    c.row_of_x = c.x_row;
    c.batch_of_x = c.x_batch;
    if (c.half || shift || row != c.k) {
        std::unique_ptr<float[]> &own = rows * row <= KEPT ? kept : large;
        if (!own) own.reset(new float[rows * row <= KEPT ? KEPT : rows * row]);
        if (wide_rows(c, std::ldexp(1.0f, shift), row, own.get(), threads) && shift) {
            c.kind = TABLE;
            shift = 0;
            wide_rows(c, 1.0f, row, own.get(), threads);
        }
        c.rows_of_x = own.get();
        c.row_of_x = row;
        c.batch_of_x = c.m * row;
    }
    if (c.bits <= 8)
        for (int i = 0; i < 1 << c.bits; i++) c.values[i] = std::ldexp(c.table[i], -shift);
    if (c.scale_kind > SINGLE)
        for (int i = 0; i < 256; i++)
            c.powers[i] = c.scale_kind == POWER ? power_of_two(i) : fine_scale(i);
    const Loop loop = chosen(c);
    in_parts(c.batches * c.n, c.m * c.k, threads, [&](int64_t a, int64_t b) {
        const Subnormals counted;
        while (a < b) {
            const int64_t batch = a / c.n, first = a - batch * c.n;
            const int64_t last = b - batch * c.n < c.n ? b - batch * c.n : c.n;
            loop(c, batch, first, last);
            a += last - first;
        }
    });
}
