// Ranges of elements for the threads of torch, whose OpenMP library is loaded when this one is.

#pragma once

#include <cstdint>

// The number of elements that torch's own loops give to one thread.
constexpr int64_t GRAIN = 1 << 15;

// Calls `loop(a, b)` for parts [a, b) of [0, count), where each index stands for `size` elements.
template <class F> void in_parts(int64_t count, int64_t size, int threads, F loop) {
    const int64_t full = count * size / GRAIN, wanted = full < threads ? full : threads;
    if (wanted < 2) {
        loop(int64_t(0), count);
        return;
    }
    const int64_t unit = size < 64 ? 64 : 1;  // no two threads write to one line of the cache
    const int64_t part = ((count + wanted - 1) / wanted + unit - 1) / unit * unit;
#pragma omp parallel for num_threads(int(wanted)) schedule(static, 1)
    for (int64_t i = 0; i < wanted; i++) {
        const int64_t a = i * part, b = a + part < count ? a + part : count;
        if (a < b) loop(a, b);
    }
}
