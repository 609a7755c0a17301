// A fused step of Adam for all parameters of a group: their scales, their expected RMS and their
// elements.
//
// `_adam_elements` in `ops/rules/optimizer.py` is the reference. It has the same arithmetic, with the
// numbers of the host and with PyTorch's operators. For a small parameter, the numbers take longer in
// Python than the elements.

#include <cmath>
#include <cstdint>

#include "floats.h"
#include "powers.h"
#include "threads.h"

namespace {

// The scale and the expected RMS of a tensor.
struct Amounts {
    float scale, rms;
};

// A parameter, with its gradient and its moments. The loop writes the new amounts into the struct.
struct Parameter {
    const void *gradient;  // bfloat16 if `half`, else float32
    float *elements, *first, *second;
    int64_t count;
    int64_t half;
    int64_t free;  // two bits each for elements and moments: the `_freedom` of the reference
    double start1, start2;  // 1 - beta^step
    Amounts of_gradient, of_elements, of_first, of_second;
};

struct Options {
    double lr, beta1, beta2, weight_decay, eps;
    double coupled;  // 1 if the decay is a term of the gradient, else 0
    double growth;  // of the second moment's RMS, by the square of the gradient's RMS
};

// The factors of the elements of a parameter.
struct Factors {
    float decay;  // of the parameter, in the gradient
    float unit;    // of the gradient, to the scale of the first moment
    float weight;  // of the gradient in the first moment
    float beta2;
    float share;  // of the squared gradient in the second moment
    float odd;  // of the second moment, under the root
    float eps;
    float kept;  // of the parameter, after decay
    float rate;
};

// `Single.__mul__` by a Python number, `quadrature` and `_finite` of the reference.
double times(double x, double y) { return single(x * single(y)); }
double quadrature(double x, double y) { return single(std::sqrt(x * x + y * y)); }
float finite(double x) {
    const double below = F32_MAX < x ? F32_MAX : x;
    return float(-F32_MAX > below ? -F32_MAX : below);
}

// `settle_in_place`: the scale stays, unless all values were zero or are of another magnitude. A part
// of a larger tensor keeps it in the second case (`free` is 1), and a part on which other ranks rely
// always keeps it (0). Returns the factor that takes the elements to the new scale.
float settled(Amounts &held, double rms, int64_t free) {
    const double kept = held.scale, far = 0x1p24;
    const bool moves = free == 2 && rms > 0 && !(kept / far <= rms && rms <= kept * far);
    const bool begins = free > 0 && held.rms == 0;
    const double scale = begins || moves ? power_of_two_near(rms) : kept;
    const double ratio = kept / scale;
    held = {float(scale), float(rms)};
    return float(F32_MAX < ratio ? F32_MAX : ratio);
}

void multiply(float *x, float factor, int64_t count, int threads) {
    if (factor == 1) return;
    in_parts(count, 1, threads, [&](int64_t a, int64_t b) {
        for (int64_t i = a; i < b; i++) x[i] *= factor;
    });
}

template <class G>
void step(const Factors f, const G *gradient, float *first, float *second, float *parameter,
          int64_t a, int64_t b) {
    for (int64_t i = a; i < b; i++) {
        const float plain = wide(gradient[i]);
        const float g = f.decay == 0 ? plain : plain + parameter[i] * f.decay;
        const float target = g * f.unit, was = first[i];
        // torch.lerp starts at the nearer end.
        const float near = std::fma(f.weight, target - was, was);
        const float far = std::fma(f.weight - 1.0f, target - was, target);
        const float m = f.weight < 0.5f ? near : far;
        const float v = std::fma(f.share * g, g, second[i] * f.beta2);
        const float divisor = std::sqrt(v * f.odd) + f.eps;
        first[i] = m;
        second[i] = v;
        parameter[i] = parameter[i] * f.kept + f.rate * m / divisor;
    }
}

// The reference has the same names.
void stepped(Parameter &p, const Options &o, int threads) {
    const double unit = p.of_gradient.scale;
    const double decay = o.coupled ? o.weight_decay : 0, decoupled = o.coupled ? 0 : o.weight_decay;
    const double spread = quadrature(p.of_gradient.rms, times(p.of_elements.rms, decay));
    const double weight = 1 - o.beta1, share = 1 - o.beta2;

    const double rms = quadrature(times(p.of_first.rms, 1 - weight), times(spread, weight));
    multiply(p.first, settled(p.of_first, rms, p.free >> 2 & 3), p.count, threads);
    const double scale = p.of_first.scale;
    const double rms_second =
        single(times(p.of_second.rms, o.beta2) + times(single(spread * spread), o.growth));
    multiply(p.second, settled(p.of_second, rms_second, p.free >> 4 & 3), p.count, threads);
    const double scale_second = p.of_second.scale;

    int exponent;
    std::frexp(scale_second, &exponent);
    const double odd = exponent & 1 ? 1 : 2;
    const double unit_root = std::sqrt(scale_second / odd / p.start2);
    const double root = single(std::sqrt(single(rms_second / single(p.start2))));
    const double expected = quadrature(root, single(o.eps));
    const double rate = o.lr / p.start1, kept = 1 - o.lr * decoupled;
    const double rms_parameter =
        quadrature(times(p.of_elements.rms, kept), times(single(rms / expected), rate));
    multiply(p.elements, settled(p.of_elements, rms_parameter, p.free & 3), p.count, threads);

    const Factors f = {
        finite(decay * p.of_elements.scale / unit),
        finite(unit / scale),
        float(weight),
        float(o.beta2),
        finite(share * unit * unit / scale_second),
        float(odd),
        finite(o.eps / unit_root),
        float(kept),
        finite(-rate * scale / unit_root / p.of_elements.scale),
    };
    in_parts(p.count, 1, threads, [&](int64_t a, int64_t b) {
        if (p.half)
            step(f, static_cast<const uint16_t *>(p.gradient), p.first, p.second, p.elements, a, b);
        else
            step(f, static_cast<const float *>(p.gradient), p.first, p.second, p.elements, a, b);
    });
}

}  // namespace

extern "C" void scaledtensor_adam(Parameter *parameters, int64_t count, const Options *options,
                                  int threads) {
    for (int64_t i = 0; i < count; i++) stepped(parameters[i], *options, threads);
}
