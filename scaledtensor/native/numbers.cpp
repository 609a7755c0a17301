// The numbers of a compiled graph: its scales and expected RMS, which follow from a few others.
//
// A program is a list of steps. Each step has the arithmetic of its operation in `scales/forms.py` with
// the host's numbers (`Numbers` in `scales/formed.py`), which is the reference: tests compare the bits
// of both. A graph of a large model has thousands of steps, and a step takes a microsecond in Python.

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "powers.h"

namespace {

// `native/numbers.py` has the names in this order.
enum Operation {
    MUL, ADD, SUB, DIV, NEG, ABS, SQRT, EXP, RSQRT, LEAST, MOST, SQUARE, ADD_SQUARE, POWER, RATIO, NONZERO,
    FINITE, SAME
};

struct Step {
    int32_t operation;
    int32_t first, second;  // places of its operands
    int32_t single;         // whether the result is a float32 number
};

struct Leaf {
    int64_t count;  // of its numbers
    int64_t wide;   // whether they are float64 numbers
};

double root(double x) { return x >= 0 ? std::sqrt(x) : std::numeric_limits<double>::quiet_NaN(); }
double least(double x, double y) { return x > y ? y : x; }
double most(double x, double y) { return x < y || y != y ? y : x; }

double result(const Step &step, double x, double y) {
    switch (step.operation) {
        case MUL: return x * y;
        case ADD: return x + y;
        case SUB: return x - y;
        case DIV: return x / y;
        case NEG: return -x;
        case ABS: return std::fabs(x);
        case SQRT: return root(x);
        case EXP: return std::exp(x);
        case RSQRT: return 1.0 / root(x);
        case LEAST: return least(x, y);
        case MOST: return most(x, y);
        case SQUARE: return x * x;
        case ADD_SQUARE: return x + y * y;
        case POWER: return power_of_two_near(float(x));
        case RATIO: return least(x / y, F32_MAX);
        case NONZERO: return x == 0 ? 1.0 : x;
        case FINITE: return std::isfinite(x) ? x : 1.0;
        default: return x;
    }
}

}  // namespace

// The numbers of the leaves have the first places, then come the constants, then the results of steps.
// Writes the numbers at the places `wanted` into `target`, and at the places `wide` into `wide_target`.
extern "C" void scaledtensor_numbers(const void *const *numbers, const Leaf *leaves, int64_t leaf_count,
                                     const double *constants, int64_t constant_count,
                                     const Step *steps, int64_t step_count,
                                     const int32_t *wanted, int64_t wanted_count, float *target,
                                     const int32_t *wide, int64_t wide_count, double *wide_target) {
    std::vector<double> values;
    for (int64_t i = 0; i < leaf_count; i++)
        for (int64_t n = 0; n < leaves[i].count; n++)
            values.push_back(leaves[i].wide ? static_cast<const double *>(numbers[i])[n]
                                            : static_cast<const float *>(numbers[i])[n]);
    values.insert(values.end(), constants, constants + constant_count);
    values.reserve(values.size() + step_count);
    for (int64_t i = 0; i < step_count; i++) {
        const Step &step = steps[i];
        const double made = result(step, values[step.first], values[step.second]);
        values.push_back(step.single ? single(made) : made);
    }
    for (int64_t i = 0; i < wanted_count; i++) target[i] = float(values[wanted[i]]);
    for (int64_t i = 0; i < wide_count; i++) wide_target[i] = values[wide[i]];
}
