// The casts of 8-bit formats for eager CPU tensors, in one pass over memory.
//
// Each function repeats, operation by operation, the arithmetic of `formats/bits.py`, which is the
// reference: tests compare the bits of both. The loops have no branch that depends on an element, so
// that the compiler turns each into vector instructions. Python passes the facts about a format;
// `formats/native.py` describes them.

#include <cstdint>

#include "floats.h"
#include "threads.h"

namespace {

struct Facts {
    int32_t bits, mantissa, bias, max_code, top_code, nan_code;  // nan_code: -1 for none
    int32_t kind;                                                // of the enumeration below
    int32_t has_nan, has_inf, p3109;
    int32_t above;     // all larger bits are NaN: the bits of infinity, or one less
    int32_t infinity;  // the code of infinity alone; 0 if it has none
    int32_t kept;                                                // random bits of a word
    float min_normal, min_subnormal, limit;                      // limit: of a subnormal
};

// PLAIN is SIGNED with a NaN, rounds to nearest even, and saturates.
enum Kind { SIGNED = 0, NO_MINUS_ZERO = 1, INTEGER = 2, EXPONENT = 3, PLAIN = 4 };

constexpr int32_t INF = 0x7F800000, NAN_BITS = 0x7FC00000;

// Unsigned arithmetic wraps around, as int32 tensors do.
inline int32_t sum(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }
inline int32_t left(int32_t a, int32_t n) { return int32_t(uint32_t(a) << n); }

// --- floats in memory ------------------------------------------------------------------------

struct Single {
    using Stored = float;
    static int32_t load(float x) { return as_int(x); }
    static float store(int32_t bits) { return as_float(bits); }
};

struct Half {  // bfloat16; every value of an 8-bit format is one
    using Stored = uint16_t;
    static int32_t load(uint16_t x) { return int32_t(uint32_t(x) << 16); }
    static uint16_t store(int32_t bits) { return uint16_t(uint32_t(bits) >> 16); }
};

// --- random words: `stochastic.py` -----------------------------------------------------------

struct Key { int32_t first, second; };

inline int32_t mixed(int32_t counter, Key key) {
    uint32_t w = uint32_t(counter) + uint32_t(key.first);
    w = (w ^ (w >> 17)) * 0xED5AD4BBu;
    w += uint32_t(key.second);
    w = (w ^ (w >> 11)) * 0xAC4C1B51u;
    w = (w ^ (w >> 15)) * 0x31848BABu;
    return int32_t(w ^ (w >> 14));
}

inline int32_t word(const Facts &f, int32_t counter, Key key) {
    return mixed(counter, key) & int32_t(~0u << (32 - f.kept));
}

// --- codes -----------------------------------------------------------------------------------

inline int32_t rebias(const Facts &f) { return left(127 - f.bias, f.mantissa); }
inline int32_t lowest(const Facts &f) { return left(128 - f.bias, 23); }

struct Both { int32_t code, value; };

// The code of a finite magnitude, and the bits of its value; for INTEGER the code alone.
template <int KIND> inline Both nearest(const Facts &f, int32_t magnitude) {
    const int32_t shift = 23 - f.mantissa, low = lowest(f);
    if (KIND == INTEGER) {
        const float size = as_float(least(magnitude, low));
        return {sum(as_int(size + 8388608.0f * f.min_subnormal), -(low + (shift << 23))), 0};
    }
    const int32_t clipped = least(magnitude, left(f.top_code + rebias(f), shift));
    const int32_t power = most(clipped, low) & INF, addend = power + (shift << 23);
    const float total = as_float(clipped) + as_float(addend);
    return {(as_int(total) - addend) + ((power - low) >> shift), as_int(total - as_float(addend))};
}

// The factors of Python's `_times_power`: a power of two in two factors if one is no float32.
struct Power { float first, second; };

template <int KIND>
inline int32_t stochastic(const Facts &f, int32_t magnitude, int32_t word, Power power) {
    const int32_t fraction = 30 - f.mantissa, shift = 23 - f.mantissa;
    const int32_t chance = (word >> (32 - fraction)) & ((1 << fraction) - 1);
    const float size = as_float(least(magnitude, as_int(f.limit)));
    const int32_t fixed = int32_t(size * power.first * power.second);
    const int32_t small = sum(fixed, chance) >> fraction;
    if (KIND == INTEGER) return small;
    const int32_t clipped = least(magnitude, left(f.top_code + rebias(f), shift));
    return most((sum(clipped, chance >> 7) >> shift) - rebias(f), small);
}

template <int KIND> inline int32_t with_sign(const Facts &f, int32_t code, int32_t bits) {
    const int32_t magnitude = bits & 0x7FFFFFFF, minus = bits >> 31;
    const int32_t nan = (f.above - magnitude) >> 31;
    if (KIND == INTEGER) {
        code = least(code & ~nan, f.max_code - minus);
        return ((code ^ minus) - minus) & ((1 << f.bits) - 1);
    }
    const int32_t top = 1 << (f.bits - 1), sign = minus & top;
    code = most(code, ((INF - 1 - magnitude) >> 31) & f.infinity);
    if (KIND == NO_MINUS_ZERO) {
        code &= ~nan;
        return code | (sign & (-code >> 31)) | (nan & top);
    }
    const int32_t known = most(code, nan & f.nan_code) | sign;
    if (KIND == PLAIN) return known;
    const int32_t none = f.nan_code >> 31;  // all ones if the format has no NaN
    return (none & ((code & ~nan) | (sign ^ (nan & top)))) | (~none & known);
}

template <bool RANDOM> inline int32_t exponent(const Facts &f, int32_t bits, int32_t word) {
    const int32_t half = 1 << 22, one = 1 << 23;
    const int32_t size = least(most(bits, half), INF), tiny = (size - one) >> 31;
    int32_t code;
    if (RANDOM) {
        const int32_t chance = (word >> 9) & (one - 1);
        code = sum(sum(size, chance), -((chance - (chance >> 1)) & tiny)) >> 23;
    } else {
        code = ((size + half) >> 23) - (((size - half - 1) >> 31) & 1);
    }
    const int32_t invalid = (bits >> 31) | (sum(bits, -1) >> 31) | ((f.above - bits) >> 31);
    return least(code, f.top_code) | (invalid & 0xFF);
}

template <int KIND, bool RANDOM>
inline int32_t code_of(const Facts &f, int32_t bits, int32_t counter, Key key, Power power) {
    const int32_t drawn = RANDOM ? word(f, counter, key) : 0;
    if (KIND == EXPONENT) return exponent<RANDOM>(f, bits, drawn);
    const int32_t magnitude = bits & 0x7FFFFFFF;
    const int32_t code = RANDOM ? stochastic<KIND>(f, magnitude, drawn, power)
                                : nearest<KIND>(f, magnitude).code;
    return with_sign<KIND>(f, code, bits);
}

// --- values ----------------------------------------------------------------------------------

template <int KIND> inline int32_t value_of(const Facts &f, int32_t raw) {
    if (KIND == EXPONENT) {
        const int32_t middle = (((raw - 1) | (254 - raw)) >> 31) & (1 << 22);
        return left(raw, 23) | middle;
    }
    if (KIND == INTEGER) {
        const int32_t number = left(raw, 32 - f.bits) >> (32 - f.bits);
        return as_int(float(number) * f.min_subnormal);
    }
    const int32_t sign_bit = 1 << (f.bits - 1), magnitude = raw & (sign_bit - 1);
    int32_t bits = sum(left(magnitude, 23 - f.mantissa), left(127 - f.bias, 23));
    const int32_t small = as_int(as_float(sum(bits, 1 << 23)) - f.min_normal);
    bits = magnitude < (1 << f.mantissa) ? small : bits;
    const int32_t special = (f.max_code - magnitude) >> 31;
    if (KIND == NO_MINUS_ZERO) {
        const int32_t infinite = special & -f.p3109, nan = -f.has_nan & ~-f.p3109;
        bits = (bits & ~infinite) | (infinite & INF) | (special & nan & NAN_BITS);
        bits |= (((raw ^ sign_bit) - 1) >> 31) & NAN_BITS;
    } else {
        bits |= special & -f.has_nan & (f.has_inf ? INF : NAN_BITS);
    }
    return bits | left(raw & sign_bit, 32 - f.bits);
}

// The codes that elements round to, and their values. For PLAIN a value comes from `nearest`, which takes
// fewer operations than decoding the code. Infinities become `infinite`, and NaNs become `nan`.
template <int KIND> struct Rounded {
    Both infinite, nan;
    explicit Rounded(const Facts &f) : infinite(decoded(f, INF)), nan(decoded(f, NAN_BITS)) {}
    static Both decoded(const Facts &f, int32_t bits) {
        const int32_t code = code_of<KIND, false>(f, bits, 0, {}, {});
        return {code, value_of<KIND>(f, code)};
    }
    Both operator()(const Facts &f, int32_t bits) const {
        if (KIND != PLAIN) return decoded(f, bits);
        const int32_t magnitude = bits & 0x7FFFFFFF, minus = bits >> 31;
        const bool special = magnitude >= INF, invalid = magnitude > f.above;
        auto [code, value] = nearest<KIND>(f, magnitude);
        code = special ? infinite.code : code;
        code = invalid ? nan.code : code;
        value = special ? infinite.value : value;
        value = invalid ? nan.value : value;
        return {code | (minus & (1 << (f.bits - 1))), value | (bits & ~0x7FFFFFFF)};
    }
};

// --- loops -----------------------------------------------------------------------------------

struct Call {
    Facts facts;
    Key key;
    Power power;
};

// Each takes the elements [a, b).
template <class F, int KIND, bool RANDOM>
void encode(const Call &call, const void *source, void *target, void *, int64_t a,
            int64_t b) {
    const auto *x = static_cast<const typename F::Stored *>(source);
    auto *y = static_cast<uint8_t *>(target);
    const Call c = call;
    for (int64_t i = a; i < b; i++)
        y[i] = uint8_t(code_of<KIND, RANDOM>(
            c.facts, F::load(x[i]), int32_t(i), c.key, c.power));
}

template <class F, int KIND, bool RANDOM>
void quantize(const Call &call, const void *source, void *target, void *, int64_t a,
            int64_t b) {
    const auto *x = static_cast<const typename F::Stored *>(source);
    auto *y = static_cast<typename F::Stored *>(target);
    const Call c = call;
    const Rounded<KIND> rounded(c.facts);
    for (int64_t i = a; i < b; i++) {
        const int32_t bits = F::load(x[i]);
        if (RANDOM) {
            const int32_t code = code_of<KIND, true>(c.facts, bits, int32_t(i), c.key, c.power);
            y[i] = F::store(value_of<KIND>(c.facts, code));
        } else {
            y[i] = F::store(rounded(c.facts, bits).value);
        }
    }
}

template <class F, int KIND, bool>
void decode(const Call &call, const void *source, void *target, void *, int64_t a,
            int64_t b) {
    const auto *x = static_cast<const uint8_t *>(source);
    auto *y = static_cast<typename F::Stored *>(target);
    const Call c = call;
    for (int64_t i = a; i < b; i++) y[i] = F::store(value_of<KIND>(c.facts, x[i]));
}

// Rounds to nearest even: codes and their values as `V`, or the values alone.
template <class F, class V, int KIND, bool CODES>
void with_values(const Call &call, const void *source, void *target, void *values, int64_t a,
                 int64_t b) {
    const auto *x = static_cast<const typename F::Stored *>(source);
    auto *__restrict y = static_cast<uint8_t *>(target);
    auto *__restrict z = static_cast<typename V::Stored *>(values);
    const Call c = call;
    const Rounded<KIND> rounded(c.facts);
    for (int64_t i = a; i < b; i++) {
        const Both both = rounded(c.facts, F::load(x[i]));
        if (CODES) y[i] = uint8_t(both.code);
        z[i] = V::store(both.value);
    }
}

using Loop = void (*)(const Call &, const void *, void *, void *, int64_t, int64_t);

#define LOOPS_OF(name, F, RANDOM)                                                     \
    {name<F, SIGNED, RANDOM>, name<F, NO_MINUS_ZERO, RANDOM>, name<F, INTEGER, RANDOM>, \
     name<F, EXPONENT, RANDOM>, name<F, PLAIN, RANDOM>}

// [cast][bfloat16][random][kind]; decoding draws nothing.
constexpr Loop LOOPS[3][2][2][5] = {
    {{LOOPS_OF(encode, Single, false), LOOPS_OF(encode, Single, true)},
     {LOOPS_OF(encode, Half, false), LOOPS_OF(encode, Half, true)}},
    {{LOOPS_OF(quantize, Single, false), LOOPS_OF(quantize, Single, true)},
     {LOOPS_OF(quantize, Half, false), LOOPS_OF(quantize, Half, true)}},
    {{LOOPS_OF(decode, Single, false), LOOPS_OF(decode, Single, false)},
     {LOOPS_OF(decode, Half, false), LOOPS_OF(decode, Half, false)}},
};

#define VALUES_OF(F, V, CODES)                                                                    \
    {with_values<F, V, SIGNED, CODES>, with_values<F, V, NO_MINUS_ZERO, CODES>,                   \
     with_values<F, V, INTEGER, CODES>, with_values<F, V, EXPONENT, CODES>,                       \
     with_values<F, V, PLAIN, CODES>}
#define BOTH_OF(F, CODES) {VALUES_OF(F, Single, CODES), VALUES_OF(F, Half, CODES)}

// [codes too][bfloat16][bfloat16 values][kind]
constexpr Loop WITH_VALUES[2][2][2][5] = {
    {BOTH_OF(Single, false), BOTH_OF(Half, false)},
    {BOTH_OF(Single, true), BOTH_OF(Half, true)},
};

}  // namespace

// `cast`: 0 encodes, 1 rounds to values, 2 decodes. `values` need cast 0 to nearest even: they are
// written in float32, or in bfloat16 if `halves`, and the codes too if `target` is not null. `key` is
// null for nearest even.
extern "C" void scaledtensor_cast(int cast, int bfloat16, const Facts *facts, const int32_t *key,
                                  float first, float second, const void *source, void *target,
                                  void *values, int halves, int64_t count, int threads) {
    Call call{*facts, {0, 0}, {first, second}};
    if (key) call.key = {key[0], key[1]};
    const bool plain = !key && facts->nan_code >= 0 && facts->top_code <= facts->max_code;
    const int kind = facts->kind == SIGNED && plain ? PLAIN : facts->kind;
    const Loop loop = values ? WITH_VALUES[target != nullptr][bfloat16][halves][kind]
                             : LOOPS[cast][bfloat16][key != nullptr][kind];
    in_parts(count, 1, threads, [&](int64_t a, int64_t b) {
        loop(call, source, target, values, a, b);
    });
}
