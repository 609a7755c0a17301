// The step of an optimizer on states in few bits, in one pass over memory.
//
// `optim/kernel.py` is the reference: it has the same arithmetic as PyTorch's operators, and says why.
// A group of 128 elements is read into buffers of float32 numbers, stepped there, and written. So each
// format and each optimizer is one loop over a group, and the compiler makes vector instructions of it.
// Powers come from a logarithm by bits and polynomials, as in the compiled step of `optim/kernel.py`.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "floats.h"
#include "threads.h"

namespace {

constexpr int GROUP = 128;
using Rows = float (*)[GROUP];
constexpr int32_t INF = 0x7F800000, DIGITS = 0x007FFFFF, ROOT_HALF = 0x3F3504F3;
constexpr int32_t LOST = 8;        // bits that a magnitude held apart loses
constexpr float RATIO = 64.0f;     // a magnitude larger by this factor is held apart
constexpr float JUMP = 4.0f;       // an M that grows by more in a step may hide a spike
constexpr float TOP = 16384.0f;    // the binade of the largest magnitude of a group in 16 bits
constexpr float LARGEST = 0x1.FFFFFEp63f;  // the largest magnitude of a gradient

enum Elements { FLOAT32, BFLOAT16, FLOAT16 };
enum Rule { ADAM, SGD, LION };
enum Flag { DECOUPLED = 1, DECAY = 2, AMSGRAD = 4, NESTEROV = 8 };
enum Master { NONE, WIDE, SPLIT };
enum Codes { PLAIN_FLOATS, HALVES, FLOAT_CODES, INTEGERS };

// The format of the states.
struct Format {
    int32_t codes;     // of the enumeration
    int32_t elements;  // of 16-bit formats and float32
    int32_t mantissa, bias, nan_code;
    int32_t spikes;  // whether a group can hold a magnitude apart
    float max, log_max;
    float wanted;        // 16 log2(max / 2f) for the least positive value f
    float wanted_below;  // 16 log2(largest free value / 2f)
    float room;          // 16 log2(max / largest free value)
};

struct State {
    void *codes;
    float *amax;
    uint8_t *power;
};

struct Part {
    void *elements;
    const void *gradient;
    int64_t count, first;  // elements, and the first group
};

// `optim.kernel.Plan`, and the memory.
struct Step {
    Format format;
    int32_t rule, flags, states, elements, gradient, master, columns, parts;
    const float *table;    // of the values of each code under each power
    const float *numbers;  // the columns of each part
    const Part *part;
    const State *state;
    void *kept;  // of the master
};

// --- floats in memory ------------------------------------------------------------------------

inline int32_t size_of(float x) { return as_int(x) & 0x7FFFFFFF; }

inline float from_half(uint16_t x) {
    const int32_t size = x & 0x7FFF;
    // The product by 2^112 moves the exponent's bias, and makes normal numbers of subnormal ones.
    const int32_t finite = as_int(as_float(size << 13) * 0x1p112f);
    const int32_t bits = size >= 0x7C00 ? INF | (size << 13) : finite;
    return as_float(bits | int32_t(uint32_t(x & 0x8000) << 16));
}

inline uint16_t to_half(float x) {  // to nearest even, without saturation
    const int32_t size = size_of(x), sign = (as_int(x) >> 16) & 0x8000;
    // Adding half of a subnormal step's power leaves the rounded number of steps in the last bits.
    const int32_t low = as_int(as_float(least(size, 0x38800000)) + 0.5f) - 0x3F000000;
    const int32_t high = (size - 0x38000000 + 0xFFF + ((size >> 13) & 1)) >> 13;
    const int32_t finite = size < 0x38800000 ? low : least(high, 0x7C00);
    return uint16_t((size > INF ? 0x7E00 : finite) | sign);
}

void read(int kind, const void *from, int64_t first, int count, float *__restrict to) {
    if (count < GROUP) std::memset(to, 0, GROUP * sizeof(float));
    if (kind == FLOAT32) {
        std::memcpy(to, static_cast<const float *>(from) + first, count * sizeof(float));
        return;
    }
    const auto *x = static_cast<const uint16_t *>(from) + first;
    if (kind == BFLOAT16)
        for (int i = 0; i < count; i++) to[i] = wide(x[i]);
    else
        for (int i = 0; i < count; i++) to[i] = from_half(x[i]);
}

void write(int kind, const float *__restrict from, void *to, int64_t first, int count) {
    if (kind == FLOAT32) {
        std::memcpy(static_cast<float *>(to) + first, from, count * sizeof(float));
        return;
    }
    auto *y = static_cast<uint16_t *>(to) + first;
    if (kind == BFLOAT16)
        for (int i = 0; i < count; i++) y[i] = bfloat16(from[i]);
    else
        for (int i = 0; i < count; i++) y[i] = to_half(from[i]);
}

inline float rounded(int kind, float x) {
    if (kind == BFLOAT16) return wide(bfloat16(x));
    return kind == FLOAT16 ? from_half(to_half(x)) : x;
}

// --- groups: `formats/expansion.py` ------------------------------------------------------------

// log2 of normal float32 numbers, given by their bits.
inline float logarithm(int32_t bits) {
    const int32_t exponent = (bits - ROOT_HALF) >> 23;
    const float f = as_float(bits - int32_t(uint32_t(exponent) << 23)) - 1.0f, f2 = f * f;
    const float a = std::fma(f, -0.7213758671f, 1.4426997233f);
    const float b = std::fma(f, -0.3589619873f, 0.4804651553f);
    const float c = std::fma(f, -0.2726967806f, 0.2972613750f);
    const float low = std::fma(f2, b, a), high = std::fma(f2, 0.1706368749f, c);
    return std::fma(f, std::fma(f2 * f2, high, low), float(exponent));
}

// 2^f for f from 0 to 1.
inline float power_of_two(float f) {
    const float a = std::fma(f, 0.2414455005f, 0.6930185302f);
    const float b = std::fma(f, 0.0135812451f, 0.0519505550f);
    return std::fma(f, std::fma(f * f, b, a), 1.0f);
}

struct Sizes {  // bits of the magnitudes
    int32_t largest, least;  // of finite numbers; the least one except zeros
    bool nan;                // whether an element is no number
};

Sizes sizes(const float *__restrict x) {
    int32_t high = 0, all = 0;
    uint32_t low = ~0u;  // the least magnitude less one; zero wraps around
    for (int i = 0; i < GROUP; i++) {
        const int32_t size = size_of(x[i]), known = size & -int32_t(size < INF);
        const uint32_t less = uint32_t(known) - 1;
        high = known > high ? known : high;
        low = less < low ? less : low;
        all = size > all ? size : all;
    }
    return {high, low == ~0u ? INF : int32_t(low + 1), all > INF};
}

float second_largest(const float *__restrict x, int32_t largest) {
    int32_t high = 0;
    for (int i = 0; i < GROUP; i++) {
        const int32_t size = size_of(x[i]);
        high = most(high, size < largest ? size : 0);
    }
    return as_float(high);
}

int power(float amax, float least, float wanted) {
    const float binades = std::log2(amax) - std::log2(least);
    const float steps = std::floor(binades > 0 ? wanted / binades : 16.0f);
    return int(steps < 1 ? 1.0f : steps > 255 ? 255.0f : steps);
}

// The M of the others and the largest magnitude, in the bits of one number.
float joined(float of_rest, float largest) {
    const int32_t kept = (as_int(largest) + (1 << (LOST - 1))) >> LOST;
    return as_float(as_bits(of_rest) | uint32_t(least(kept, 0x7F7FFFFF >> LOST)) | 0x80000000u);
}

struct Parted { float of_rest, largest; };

Parted parted(float amax) {
    const int32_t bits = as_int(amax);
    if (bits >= 0) return {amax, amax};
    return {as_float(bits & INF), as_float((bits & DIGITS) << LOST)};
}

// Above this M after a step, a magnitude may stand out.
float bound(float amax) { return amax < 0 || amax == 1.0f ? 0.0f : amax * JUMP; }

bool stands_out(float largest, float second, float of_rest) {
    return second > 0 && largest > of_rest * RATIO;
}

// The codes of sign(x) F (|x| / M)^p. With RARE, an element may be subnormal or no number.
//
// The work is three loops, because the operations of one element wait for each other: a CPU has more
// elements in flight if a loop has fewer of these operations.
template <bool FLOATS, bool RARE>
void codes(const Format &f, const float *__restrict x, float amax, float exponent,
           uint8_t *__restrict y) {
    const int32_t top = as_int(amax), nan = f.nan_code < 0 ? 0 : f.nan_code;
    const auto place_of = [](int32_t bits) {
        if (!RARE) return logarithm(bits);
        const bool small = bits < 0x00800000;
        const float moved = logarithm(small ? as_int(as_float(bits) * 0x1p24f) : bits);
        return small ? moved - 24.0f : moved;
    };
    alignas(64) float places[GROUP], wide[GROUP];
    const float of_top = place_of(top), log_max = f.log_max;
    for (int i = 0; i < GROUP; i++) places[i] = place_of(least(size_of(x[i]), top)) - of_top;

    // Numbers from here down round to zero, as zero itself does.
    const float of_zero = FLOATS ? float(-1 - f.bias - f.mantissa) : -2.0f;
    for (int i = 0; i < GROUP; i++) {
        const float exact = std::fma(places[i], exponent, log_max);
        const float place = exact > of_zero ? exact : of_zero, floor = std::floor(place);
        const int32_t binade = int32_t(uint32_t(int32_t(floor)) << 23);
        wide[i] = as_float(as_int(power_of_two(place - floor)) + binade);
    }

    // Codes of floats as in `nearest` of `casts.cpp`.
    const int32_t shift = 23 - f.mantissa, low = (128 - f.bias) << 23;
    alignas(64) int32_t made[GROUP];
    for (int i = 0; i < GROUP; i++) {
        const int32_t bits = as_int(x[i]), size = bits & 0x7FFFFFFF;
        int32_t code;
        if (FLOATS) {
            const int32_t power = most(as_int(wide[i]), low) & INF, addend = power + (shift << 23);
            code = as_int(wide[i] + as_float(addend)) - addend + ((power - low) >> shift);
        } else {
            code = as_int(wide[i] + 8388608.0f);  // of which the last byte counts
        }
        if (RARE) code = size == 0 ? 0 : size > INF ? nan : code;
        made[i] = FLOATS ? code | ((bits >> 24) & 0x80) : bits < 0 ? -code : code;
    }
    for (int i = 0; i < GROUP; i++) y[i] = uint8_t(made[i]);
}

// The numbers of a group, after a look at its elements.
struct Chosen {
    float amax, exponent;
    bool rare;
};

Chosen choose(const Format &f, const float *x, const State &s, int64_t group) {
    const Sizes size = sizes(x);
    const float largest = as_float(size.largest), least = as_float(size.least);
    float amax = largest > 0 ? largest : 1.0f, kept = amax;
    int its = power(amax, least, f.wanted);
    if (f.spikes && amax != 1.0f && amax > bound(s.amax[group])) {
        const float second = second_largest(x, size.largest);
        const int other = power(second * 2, least, f.wanted_below);
        // The factor leaves a little more room than needed, since powers are not exact.
        const float room = std::exp2(f.room / float(other)) * (1.0f + 0x1p-8f);
        const float of_rest = as_float((as_int(second * room) + DIGITS) & INF);
        if (stands_out(largest, second, of_rest)) {
            kept = joined(of_rest, largest);
            amax = of_rest;
            its = other;
        }
    }
    s.amax[group] = kept;
    s.power[group] = uint8_t(its);
    const bool rare = size.nan || size.least < 0x00800000 || amax < 0x1p-126f;
    return {amax, float(its) / 16.0f, rare};
}

void write_codes(const Format &f, Rows rows, const State *states, int count, int64_t group) {
    Chosen made[3];
    for (int k = 0; k < count; k++) made[k] = choose(f, rows[k], states[k], group);
    for (int k = 0; k < count; k++) {
        const bool rare = made[k].rare;
        const auto make = f.codes == INTEGERS ? (rare ? codes<false, true> : codes<false, false>)
                                              : (rare ? codes<true, true> : codes<true, false>);
        uint8_t *y = static_cast<uint8_t *>(states[k].codes) + group * GROUP;
        make(f, rows[k], made[k].amax, made[k].exponent, y);
    }
}

void read_codes(const float *table, const State &s, int64_t group, float *__restrict to) {
    const Parted m = parted(s.amax[group]);
    const float *row = table + 256 * int64_t(s.power[group]);
    const uint8_t *x = static_cast<const uint8_t *>(s.codes) + group * GROUP;
    if (m.largest == m.of_rest) {
        for (int i = 0; i < GROUP; i++) to[i] = row[x[i]] * m.of_rest;
        return;
    }
    for (int i = 0; i < GROUP; i++) {
        const float unit = row[x[i]];
        to[i] = unit * (std::fabs(unit) == 1.0f ? m.largest : m.of_rest);
    }
}

float scale_of(float largest) {
    if (!(largest > 0)) return 1.0f;
    const float scale = as_float(as_int(largest) & INF) * (1.0f / TOP);
    return scale < 0x1p-126f ? 0x1p-126f : scale;
}

void write_halves(const Format &f, const float *x, const State &s, int64_t group) {
    const Sizes size = sizes(x);
    const float largest = as_float(size.largest);
    float scale = scale_of(largest), kept = scale;
    bool apart = false;
    if (f.spikes && scale != 1.0f && scale > bound(s.amax[group])) {
        const float second = second_largest(x, size.largest), of_rest = scale_of(second);
        apart = stands_out(largest, second, of_rest * (2 * TOP));
        if (apart) {
            kept = joined(of_rest, largest);
            scale = of_rest;
        }
    }
    s.amax[group] = kept;
    s.power[group] = 16;
    float held[GROUP];
    const float factor = 1.0f / scale;  // a power of two
    for (int i = 0; i < GROUP; i++) held[i] = x[i] * factor;
    if (apart)
        for (int i = 0; i < GROUP; i++) {
            const float within = held[i] > f.max ? f.max : held[i] < -f.max ? -f.max : held[i];
            held[i] = size_of(x[i]) < INF ? within : held[i];
        }
    write(f.elements, held, s.codes, group * GROUP, GROUP);
}

void read_halves(const Format &f, const State &s, int64_t group, float *__restrict to) {
    read(f.elements, s.codes, group * GROUP, GROUP, to);
    const Parted m = parted(s.amax[group]);
    if (m.largest == m.of_rest)
        for (int i = 0; i < GROUP; i++) to[i] *= m.of_rest;
    else
        for (int i = 0; i < GROUP; i++) {
            const float most = m.largest * (1.0f / f.max);
            to[i] *= std::fabs(to[i]) == f.max ? most : m.of_rest;
        }
}

// --- masters: `optim/masters.py` ---------------------------------------------------------------

void read_value(const Step &s, const Part &p, int64_t at, int64_t group, int count, float unit,
                float *__restrict value) {
    read(s.elements, p.elements, at, count, value);
    if (s.master == WIDE) {  // the master, unless the parameter was written since the last step
        const float *kept = static_cast<const float *>(s.kept) + group * GROUP;
        const int kind = s.elements;
        for (int i = 0; i < count; i++) {
            const float master = kept[i] / unit;
            value[i] = rounded(kind, master) == value[i] ? master : value[i];
        }
    } else if (s.master == SPLIT) {
        const int16_t *low = static_cast<const int16_t *>(s.kept) + group * GROUP;
        for (int i = 0; i < count; i++) value[i] = as_float(as_bits(value[i]) + uint32_t(int32_t(low[i])));
    }
}

void write_value(const Step &s, const Part &p, int64_t at, int64_t group, int count, float unit,
                 float *__restrict value) {
    if (s.master == SPLIT) {
        int16_t *low = static_cast<int16_t *>(s.kept) + group * GROUP;
        auto *y = static_cast<uint16_t *>(p.elements) + at;
        for (int i = 0; i < count; i++) {
            const int32_t bits = value[i] == value[i] ? as_int(value[i]) : 0x7FC00000;
            const int32_t high = int32_t(uint32_t(bits) + (1u << 15)) >> 16;
            y[i] = uint16_t(high);
            low[i] = int16_t(uint32_t(bits) - (uint32_t(high) << 16));
        }
        return;
    }
    write(s.elements, value, p.elements, at, count);
    if (s.master == WIDE) {
        float *kept = static_cast<float *>(s.kept) + group * GROUP;
        for (int i = 0; i < count; i++) kept[i] = value[i] * unit;
    }
}

// --- updates: `optim/updates.py`, whose `columns` give the order of `c` -------------------------

template <int FLAGS>
void adam(const float *c, float *__restrict value, const float *__restrict gradient, Rows states) {
    const float decay = c[1], rate = c[2], first = c[3], keep = c[4], second = c[5], root = c[6];
    const float eps = c[7];
    float *__restrict m = states[0], *__restrict v = states[1], *__restrict top = states[2];
    for (int i = 0; i < GROUP; i++) {
        const float was = FLAGS & DECOUPLED ? value[i] * decay : value[i];
        float g = FLAGS & DECAY ? gradient[i] + was * decay : gradient[i];
        const float low = g < -LARGEST ? -LARGEST : g, within = low > LARGEST ? LARGEST : low;
        g = std::fabs(g) < INFINITY ? within : g;
        const float mean = m[i] + (g - m[i]) * first, square = v[i] * keep + g * g * second;
        float under = square;
        if (FLAGS & AMSGRAD) under = top[i] = square <= top[i] || top[i] != top[i] ? top[i] : square;
        m[i] = mean;
        v[i] = square;
        value[i] = was - rate * (mean / (std::sqrt(under) * root + eps));
    }
}

void sgd(const float *c, int flags, int held, float *__restrict value, float *__restrict g,
         Rows states) {
    const float decay = c[1], rate = c[2], momentum = c[3], keep = c[4], add = c[5];
    float *__restrict buffer = states[0];
    if (flags & DECAY)
        for (int i = 0; i < GROUP; i++) g[i] += value[i] * decay;
    if (!held) {
        for (int i = 0; i < GROUP; i++) value[i] -= rate * g[i];
        return;
    }
    for (int i = 0; i < GROUP; i++) buffer[i] = buffer[i] * keep + g[i] * add;
    if (flags & NESTEROV)
        for (int i = 0; i < GROUP; i++) value[i] -= rate * (g[i] + buffer[i] * momentum);
    else
        for (int i = 0; i < GROUP; i++) value[i] -= rate * buffer[i];
}

constexpr decltype(&adam<0>) ADAMS[] = {adam<0>, adam<1>, adam<2>, nullptr,
                                       adam<4>, adam<5>, adam<6>};

void lion(const float *c, float *__restrict value, const float *__restrict g, Rows states) {
    const float decay = c[1], rate = c[2], look = c[3], add = c[4];
    float *__restrict m = states[0];
    for (int i = 0; i < GROUP; i++) {
        const float towards = m[i] + (g[i] - m[i]) * look;
        const float sign = float((towards > 0) - (towards < 0));
        value[i] = value[i] * decay - rate * sign;
        m[i] += (g[i] - m[i]) * add;
    }
}

// --- the step ----------------------------------------------------------------------------------

void one_group(const Step &s, const Part &p, const float *c, int64_t group) {
    alignas(64) float values[GROUP], g[GROUP], rows[3][GROUP];
    const int64_t at = (group - p.first) * GROUP, rest = p.count - at;
    const int count = int(rest < GROUP ? rest : GROUP);
    const float unit = c[s.columns - 1], of_gradient = c[0];
    const Format &f = s.format;

    // A whole group of float32 numbers is read and written where it is.
    const bool here = s.elements == FLOAT32 && s.master == NONE && count == GROUP;
    float *value = here ? static_cast<float *>(p.elements) + at : values;
    if (!here) read_value(s, p, at, group, count, unit, value);
    const float *from = static_cast<const float *>(p.gradient) + at;
    if (s.gradient != FLOAT32 || count < GROUP) {
        read(s.gradient, p.gradient, at, count, g);
        from = g;
    }
    for (int i = 0; i < GROUP; i++) g[i] = from[i] * of_gradient;
    for (int k = 0; k < s.states; k++) {
        if (f.codes == PLAIN_FLOATS)
            read(FLOAT32, s.state[k].codes, group * GROUP, GROUP, rows[k]);
        else if (f.codes == HALVES)
            read_halves(f, s.state[k], group, rows[k]);
        else
            read_codes(s.table, s.state[k], group, rows[k]);
    }

    if (s.rule == ADAM)
        ADAMS[s.flags](c, value, g, rows);
    else if (s.rule == SGD)
        sgd(c, s.flags, s.states, value, g, rows);
    else
        lion(c, value, g, rows);

    if (f.codes == FLOAT_CODES || f.codes == INTEGERS)
        write_codes(f, rows, s.state, s.states, group);
    else
        for (int k = 0; k < s.states; k++) {
            if (f.codes == PLAIN_FLOATS)
                write(FLOAT32, rows[k], s.state[k].codes, group * GROUP, GROUP);
            else
                write_halves(f, rows[k], s.state[k], group);
        }
    if (!here) write_value(s, p, at, group, count, unit, value);
}

}  // namespace

extern "C" void scaledtensor_step(const Step *step, int64_t groups, int threads) {
    const Step &s = *step;
    in_parts(groups, GROUP, threads, [&](int64_t a, int64_t b) {
        int k = 0;
        for (int64_t group = a; group < b; group++) {
            while (k + 1 < s.parts && s.part[k + 1].first <= group) k++;
            one_group(s, s.part[k], s.numbers + int64_t(k) * s.columns, group);
        }
    });
}
