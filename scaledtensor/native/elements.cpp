// Elementwise work of eager training steps on a CPU, in one pass over memory.
//
// Each function has the operations of the rule that calls it, in their order. Without a library the
// rule runs them one by one in PyTorch.

#include <cmath>
#include <cstdint>

#include "floats.h"
#include "threads.h"

namespace {

inline float wide(float x) { return x; }

// The names are the names of `_adam_elements` in `ops/rules/optimizer.py`.
struct Adam {
    float unit;    // of the gradient, to the scale of the first moment
    float weight;  // of the gradient in the first moment
    float beta2;
    float share;  // of the squared gradient in the second moment
    float eps;
    float kept;  // of the parameter, after decay
    float rate;
};

template <class G>
void adam(const Adam f, const G *gradient, float *first, float *second, float *parameter, int64_t a,
          int64_t b) {
    for (int64_t i = a; i < b; i++) {
        const float g = wide(gradient[i]), target = g * f.unit, was = first[i];
        // torch.lerp starts at the nearer end.
        const float near = std::fma(f.weight, target - was, was);
        const float far = std::fma(f.weight - 1.0f, target - was, target);
        const float m = f.weight < 0.5f ? near : far;
        const float v = std::fma(f.share * g, g, second[i] * f.beta2);
        const float divisor = std::sqrt(v) + f.eps;
        first[i] = m;
        second[i] = v;
        parameter[i] = parameter[i] * f.kept + f.rate * m / divisor;
    }
}

}  // namespace

extern "C" void scaledtensor_adam(int half, const Adam *factors, const void *gradient, float *first,
                                  float *second, float *parameter, int64_t count, int threads) {
    const Adam f = *factors;
    in_parts(count, 1, threads, [&](int64_t a, int64_t b) {
        if (half)
            adam(f, static_cast<const uint16_t *>(gradient), first, second, parameter, a, b);
        else
            adam(f, static_cast<const float *>(gradient), first, second, parameter, a, b);
    });
}

// Rounds the rows of a product times `ratio` to bfloat16, in place if `out` is null. With `bias`, a
// row, the result is the rounded rows times `kept` plus the bias times `share`, as bfloat16.
extern "C" void scaledtensor_rounded_rows(float *product, const float *bias, uint16_t *out,
                                          float ratio, float kept, float share, int64_t rows,
                                          int64_t columns, int threads) {
    in_parts(rows, columns, threads, [&](int64_t a, int64_t b) {
        float *x = product + a * columns;
        uint16_t *y = out + a * columns;
        const int64_t count = (b - a) * columns;
        if (!out) {
            for (int64_t i = 0; i < count; i++) x[i] = wide(bfloat16(x[i] * ratio));
        } else if (!bias) {
            for (int64_t i = 0; i < count; i++) y[i] = bfloat16(x[i] * ratio);
        } else {
            for (; a < b; a++, x += columns, y += columns)
                for (int64_t i = 0; i < columns; i++) {
                    const float rounded = wide(bfloat16(x[i] * ratio));
                    // `kept` is a power of two, so a factor of 1 or more rounds nothing.
                    const float base = kept >= 1 ? rounded * kept : wide(bfloat16(rounded * kept));
                    y[i] = bfloat16(base + bias[i] * share);
                }
        }
    });
}
