// Eight float32 lanes, and the decoders of `products.cpp`: codes to float32 numbers in registers.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "floats.h"

// Without these instructions every decoder is a table or a conversion, and the compiler chooses vectors.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define VECTORS 1
#include <immintrin.h>
#endif

namespace {

enum Kind { FP32, BF16, E4M3, E5M2, INT8, FOUR, E3M2, E2M3, TABLE };

constexpr int64_t CHUNK = 32;  // elements that are decoded at once

struct Codes {
    int kind, bits;
    const float *values;  // of codes of at most 8 bits, times 2^-shift
};

// --- eight lanes -----------------------------------------------------------------------------

#ifdef VECTORS
using V = __m256;
inline V zero() { return _mm256_setzero_ps(); }
inline V load(const void *x) { return _mm256_loadu_ps(static_cast<const float *>(x)); }
inline void store(float *x, V v) { _mm256_storeu_ps(x, v); }
inline V all(float x) { return _mm256_set1_ps(x); }
inline V times(V a, V b) { return _mm256_mul_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(V v) {
    const __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 t = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t))) + 0.0f;
}
#else
struct V { float lane[8]; };
template <class F> inline V each(F f) {
    V v;
    for (int j = 0; j < 8; j++) v.lane[j] = f(j);
    return v;
}
inline V zero() { return V{}; }
inline V load(const void *x) { V v; std::memcpy(&v, x, 32); return v; }
inline void store(float *x, const V &v) { std::memcpy(x, &v, 32); }
inline V all(float x) { return each([=](int) { return x; }); }
inline V times(const V &a, const V &b) { return each([&](int j) { return a.lane[j] * b.lane[j]; }); }
inline V fma(const V &a, const V &b, const V &c) {
    return each([&](int j) { return std::fma(a.lane[j], b.lane[j], c.lane[j]); });
}
inline float sum(const V &v) {
    float s[4];
    for (int j = 0; j < 4; j++) s[j] = v.lane[j] + v.lane[j + 4];
    return ((s[0] + s[2]) + (s[1] + s[3])) + 0.0f;
}
#endif

// --- decoders --------------------------------------------------------------------------------
//
// `decode(codes, w)` gives the 32 values of a chunk times 2^-shift. `failed` tells whether a chunk
// since the decoder's making had a code that only the table decodes.

// The power of two that the decoder of a kind leaves out.
inline int shift_of(int kind) {
#ifdef VECTORS
    return kind == E4M3 ? 8 : kind == E3M2 ? 12 : kind == E2M3 ? 14 : 0;
#else
    return (void)kind, 0;
#endif
}

struct Single {
    explicit Single(const Codes &) {}
    void decode(const uint8_t *codes, V *w) {
        for (int i = 0; i < 4; i++) w[i] = load(codes + 32 * i);
    }
    bool failed() const { return false; }
};

// Every format of at most 8 bits.
struct Table {
    const float *table;
    const int bits;
    explicit Table(const Codes &of) : table(of.values), bits(of.bits) {}
    void decode(const uint8_t *codes, V *w) {
        float x[CHUNK];
        if (bits == 8)
            for (int i = 0; i < CHUNK; i++) x[i] = table[codes[i]];
        else
            for (int i = 0; i < CHUNK; i++) {
                const int at = i * bits, low = at & 7;
                int word = codes[at >> 3];
                if (low + bits > 8) word |= codes[(at >> 3) + 1] << 8;
                x[i] = table[(word >> low) & ((1 << bits) - 1)];
            }
        for (int i = 0; i < 4; i++) w[i] = load(x + 8 * i);
    }
    bool failed() const { return false; }
};

#ifdef VECTORS
inline __m128i eight(const uint8_t *x) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(x));
}
inline __m128i sixteen(const uint8_t *x) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(x));
}
inline __m256i twice(__m128i x) { return _mm256_broadcastsi128_si256(x); }
// Sixteen binary16 numbers as float32.
inline void from_half(__m256i x, V *w) {
    w[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(x));
    w[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
}

inline __m256i one_bit(int place) { return _mm256_set1_epi32(1 << place); }

struct Brain {
    explicit Brain(const Codes &) {}
    void decode(const uint8_t *codes, V *w) {
        for (int i = 0; i < 4; i++)
            w[i] = _mm256_castsi256_ps(
                _mm256_slli_epi32(_mm256_cvtepu16_epi32(sixteen(codes + 16 * i)), 16));
    }
    bool failed() const { return false; }
};

// The bits of E4M3FN, after a shift, are a binary16 number of 2^-8 times the value. The bit below the
// sign has to be 0. NaN has the bits of 480, and only the table gives a NaN.
inline __m128i fine_half(__m128i wide) {
    return _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(int16_t(0xBFFF)));
}

struct Fine {
    __m256i most = _mm256_setzero_si256();
    explicit Fine(const Codes &) {}
    void decode(const uint8_t *codes, V *w) {
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes));
        most = _mm256_max_epu8(most, _mm256_or_si256(raw, _mm256_set1_epi8(-128)));
        for (int i = 0; i < 2; i++) {
            const __m256i wide = _mm256_cvtepi8_epi16(sixteen(codes + 16 * i));
            const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7),
                                                  _mm256_set1_epi16(int16_t(0xBFFF)));
            from_half(half, w + 2 * i);
        }
    }
    // With the sign bit set, only NaN is 0xFF.
    bool failed() const {
        return _mm256_movemask_epi8(_mm256_cmpeq_epi8(most, _mm256_set1_epi8(-1))) != 0;
    }
};

// E5M2 is the upper byte of binary16.
struct Coarse {
    explicit Coarse(const Codes &) {}
    void decode(const uint8_t *codes, V *w) {
        for (int i = 0; i < 2; i++)
            from_half(_mm256_slli_epi16(_mm256_cvtepu8_epi16(sixteen(codes + 16 * i)), 8),
                      w + 2 * i);
    }
    bool failed() const { return false; }
};

struct Integer {
    explicit Integer(const Codes &) {}
    void decode(const uint8_t *codes, V *w) {
        for (int i = 0; i < 4; i++)
            w[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight(codes + 8 * i)));
    }
    bool failed() const { return false; }
};

// A format of 4 bits. Its values are bfloat16 numbers, whose bytes two tables of 16 have.
struct Four {
    __m256i high, low;
    explicit Four(const Codes &of) {
        alignas(16) uint8_t bytes[2][16];
        for (int i = 0; i < 16; i++) {
            bytes[0][i] = uint8_t(as_bits(of.values[i]) >> 24);
            bytes[1][i] = uint8_t(as_bits(of.values[i]) >> 16);
        }
        high = twice(sixteen(bytes[0]));
        low = twice(sixteen(bytes[1]));
    }
    void decode(const uint8_t *codes, V *w) {
        // A 32-bit lane gets the codes i and i + 8 in its two words, for i = 0 to 7 and 16 to 23.
        const __m256i place =
            _mm256_setr_epi8(0, 4, 0, 4, 1, 5, 1, 5, 8, 12, 8, 12, 9, 13, 9, 13, 2, 6, 2, 6, 3, 7, 3,
                             7, 10, 14, 10, 14, 11, 15, 11, 15);
        const __m256i pairs = _mm256_shuffle_epi8(twice(sixteen(codes)), place);
        const __m256i nibbles =
            _mm256_and_si256(_mm256_blend_epi16(pairs, _mm256_srli_epi16(pairs, 4), 0xAA),
                             _mm256_set1_epi8(15));
        const __m256i upper = _mm256_shuffle_epi8(high, nibbles);
        const __m256i lower = _mm256_shuffle_epi8(low, nibbles);
        const __m256i a = _mm256_unpacklo_epi8(lower, upper);
        const __m256i b = _mm256_unpackhi_epi8(lower, upper);
        const __m256i odd = _mm256_set1_epi32(int32_t(0xFFFF0000));
        w[0] = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
        w[1] = _mm256_castsi256_ps(_mm256_and_si256(a, odd));
        w[2] = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
        w[3] = _mm256_castsi256_ps(_mm256_and_si256(b, odd));
    }
    bool failed() const { return false; }
};

// Four codes of 6 bits in 3 bytes. Their bits, after a shift, are a binary16 number of 2^-12 (E3M2FN)
// or 2^-14 (E2M3FN) times the value.
struct Six {
    const __m256i mask;
    const __m128i right;
    explicit Six(const Codes &of)
        : mask(_mm256_set1_epi16(int16_t(of.kind == E3M2 ? 0x9F00 : 0x8F80))),
          right(_mm_cvtsi32_si128(of.kind == E3M2 ? 2 : 3)) {}
    void decode(const uint8_t *codes, V *w) {
        const __m256i left = _mm256_set1_epi64x(int64_t(1) << 48 | int64_t(1) << 38 |
                                                int64_t(1) << 20 | int64_t(1) << 10);
        for (int i = 0; i < 2; i++) {
            // The second 16 codes are bytes 12 to 23, read from byte 8.
            const __m256i place = _mm256_add_epi8(
                _mm256_setr_epi8(0, 1, 0, 1, 1, 2, 1, 2, 3, 4, 3, 4, 4, 5, 4, 5, 6, 7, 6, 7, 7, 8,
                                 7, 8, 9, 10, 9, 10, 10, 11, 10, 11),
                _mm256_set1_epi8(char(4 * i)));
            const __m256i words = _mm256_shuffle_epi8(twice(sixteen(codes + 8 * i)), place);
            const __m256i top = _mm256_mullo_epi16(words, left);  // the code in the upper bits
            from_half(_mm256_and_si256(_mm256_sra_epi16(top, right), mask), w + 2 * i);
        }
    }
    bool failed() const { return false; }
};
#else
struct Brain {
    explicit Brain(const Codes &) {}
    void decode(const uint8_t *codes, V *w) {
        uint16_t x[CHUNK];
        std::memcpy(x, codes, sizeof x);
        for (int i = 0; i < 4; i++)
            w[i] = each([&](int j) { return as_float(uint32_t(x[8 * i + j]) << 16); });
    }
    bool failed() const { return false; }
};
using Fine = Table;
using Coarse = Table;
using Integer = Table;
using Four = Table;
using Six = Table;
#endif

}  // namespace
