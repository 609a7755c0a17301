// Rows of codes times their scales, for eager CPU tensors: the keys and values of a cache.
//
// An element is code * scale, one float32 product with one rounding; a bfloat16 result is rounded
// once more. So the bits are the same for every decoder, number of threads and CPU.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "decoders.h"
#include "floats.h"
#include "threads.h"

// The fields are described in `rows.py`.
struct Rows {
    const uint8_t *codes;
    const float *scale, *table;
    void *y;
    int64_t batches, rows, width;
    int64_t code_row, code_batch;  // in bytes
    int64_t scale_row, scale_batch;
    int64_t first, group, block;
    int32_t kind, bits, half;
};

namespace {

constexpr int LANES = 8;

struct Call : Rows {
    std::vector<int64_t> places;  // of the scales of each eight lanes, if they share a scale
};

inline void scales_of(const Call &c, const float *scale, int64_t column, V *s) {
    if (c.block == 1)
        for (int i = 0; i < 4; i++) s[i] = load(scale + column + LANES * i);
    else
        for (int i = 0; i < 4; i++) s[i] = all(scale[c.places[column / LANES + i]]);
}

// The columns of the last chunk, or of any chunk whose lanes have several scales.
inline void scales_of(const Call &c, const float *scale, int64_t column, int64_t count, V *s) {
    float x[CHUNK] = {};
    for (int64_t i = 0; i < count; i++) x[i] = scale[(column + i) / c.block];
    for (int i = 0; i < 4; i++) s[i] = load(x + LANES * i);
}

inline void write(const Call &c, int64_t at, int64_t count, const V *w) {
    float own[CHUNK];
    float *y = c.half || count < CHUNK ? own : static_cast<float *>(c.y) + at;
    for (int i = 0; i < 4; i++) store(y + LANES * i, w[i]);
    if (c.half) {
        uint16_t *to = static_cast<uint16_t *>(c.y) + at;
        for (int64_t i = 0; i < count; i++) to[i] = bfloat16(own[i]);
    } else if (count < CHUNK) {
        std::memcpy(static_cast<float *>(c.y) + at, own, size_t(count) * sizeof(float));
    }
}

// Rows from a to b of all batches. Returns false if the decoder failed.
template <class D> bool decode(const Call &c, int64_t a, int64_t b) {
    const int shift = shift_of(c.kind);
    D decoder(Codes{c.kind, c.bits, c.table});
    const V power = all(std::ldexp(1.0f, shift));
    const bool whole = c.block == 1 || c.block % LANES == 0;
    for (int64_t i = a; i < b; i++) {
        const int64_t batch = i / c.rows, row = i % c.rows;
        const uint8_t *codes = c.codes + batch * c.code_batch + row * c.code_row;
        const float *scale =
            c.scale + batch * c.scale_batch + (c.first + row) / c.group * c.scale_row;
        for (int64_t column = 0; column < c.width; column += CHUNK) {
            const int64_t count = std::min(CHUNK, c.width - column);
            const uint8_t *from = codes + column * c.bits / 8;
            uint8_t tail[CHUNK * sizeof(float)] = {};
            if (count < CHUNK) {
                std::memcpy(tail, from, size_t((count * c.bits + 7) / 8));
                from = tail;
            }
            V w[4], s[4];
            decoder.decode(from, w);
            if (whole && count == CHUNK)
                scales_of(c, scale, column, s);
            else
                scales_of(c, scale, column, count, s);
            for (int j = 0; j < 4; j++) w[j] = times(shift ? times(w[j], power) : w[j], s[j]);
            write(c, i * c.width + column, count, w);
        }
    }
    return !decoder.failed();
}

void decode(const Call &c, int64_t a, int64_t b) {
    bool done = true;
    switch (c.kind) {
        case FP32: done = decode<Single>(c, a, b); break;
        case BF16: done = decode<Brain>(c, a, b); break;
        case E4M3: done = decode<Fine>(c, a, b); break;
        case E5M2: done = decode<Coarse>(c, a, b); break;
        case INT8: done = decode<Integer>(c, a, b); break;
        case FOUR: done = decode<Four>(c, a, b); break;
        case E3M2:
        case E2M3: done = decode<Six>(c, a, b); break;
        default: done = false;
    }
    if (done) return;
    Call table = c;
    table.kind = TABLE;
    decode<Table>(table, a, b);
}

}  // namespace

extern "C" void scaledtensor_rows(const Rows *rows, int threads) {
    Call call{*rows, {}};
    for (int64_t i = 0; i < call.width; i += LANES) call.places.push_back(i / call.block);
    in_parts(call.batches * call.rows, call.width, threads,
             [&](int64_t a, int64_t b) { decode(call, a, b); });
}
