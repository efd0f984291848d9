// Work on a row of logits before a token is drawn. Plain loops over the row or over short blocks: the compiler makes vectors.
#pragma once

#include "best.h"

namespace headrace::HR_ISA {

// Forbids tokens whose bit, the lowest first, is not set.
static void apply_bitmask(float* x, const uint32_t* words, int n) {
    const float forbidden = -__builtin_inff();
    for (int i = 0; i < n; i += 32) {
        const uint32_t word = words[i / 32];
        if (word == 0xffffffffu) continue;
        if (n - i >= 32)
            for (int j = 0; j < 32; ++j) x[i + j] = word >> j & 1 ? x[i + j] : forbidden;
        else
            for (int j = 0; j < n - i; ++j) x[i + j] = word >> j & 1 ? x[i + j] : forbidden;
    }
}

// Most tokens stand nowhere in prompt and output, so whole blocks need nothing.
static void apply_penalties(float* x, const uint8_t* in_prompt, const int32_t* counts, int n, float repetition, float frequency,
                            float presence) {
    constexpr int block = 64;
    for (int first = 0; first < n; first += block) {
        const int end = n - first < block ? n : first + block;
        int32_t any = 0;
        for (int i = first; i < end; ++i) any |= counts[i] | in_prompt[i];
        for (int i = first; any && i < end; ++i) {
            if (counts[i] == 0 && !in_prompt[i]) continue;
            if (repetition != 1.0f) x[i] = x[i] > 0 ? x[i] / repetition : x[i] * repetition;
            if (counts[i] != 0) x[i] -= frequency * float(counts[i]) + presence;
        }
    }
}

static void scale_logits(float* x, int n, float peak, float temperature) {
    for (int i = 0; i < n; ++i) x[i] = (x[i] - peak) / temperature;
}

// A loop without branches, or it would stay one value at a time.
HR_INLINE void weigh_block(const float* below, int n, int64_t* weights) {
    constexpr double magic = 0x1.8p52;
    for (int i = 0; i < n; ++i) {
        const double t = double(below[i]);
        const double shifted = t * 1.4426950408889634 + magic, whole = shifted - magic;
        const double r = (t - whole * 0.693147180369123816490) - whole * 1.90821492927058770002e-10;
        double p = 1.0 / 39916800;
        p = p * r + 1.0 / 3628800;
        p = p * r + 1.0 / 362880;
        p = p * r + 1.0 / 40320;
        p = p * r + 1.0 / 5040;
        p = p * r + 1.0 / 720;
        p = p * r + 1.0 / 120;
        p = p * r + 1.0 / 24;
        p = p * r + 1.0 / 6;
        p = p * r + 0.5;
        p = p * r + 1.0;
        p = p * r + 1.0;
        const int64_t exponent = __builtin_bit_cast(int64_t, shifted) - __builtin_bit_cast(int64_t, magic) + 1023 + 34;
        const double scaled = p * __builtin_bit_cast(double, exponent << 52) + magic;
        weights[i] = __builtin_bit_cast(int64_t, scaled) - __builtin_bit_cast(int64_t, magic);
    }
}

// 2^34 exp(x - peak), rounded to an integer; see docs/numerics.md.
static void weigh(const float* x, int n, float peak, int64_t* weights) {
    alignas(64) float below[kPeakBlock];
    for (int first = 0; first < n; first += kPeakBlock) {
        const int count = n - first < kPeakBlock ? n - first : kPeakBlock;
        for (int i = 0; i < count; i += N)
            store(below + i, max(sub(load_part(x + first + i, part(count, i)), bcast(peak)), bcast(-30.0f)));
        if (count == kPeakBlock) weigh_block(below, kPeakBlock, weights + first);
        else weigh_block(below, count, weights + first);
    }
}

static void block_peaks(const float* x, int n, float* peaks) {
    for (int first = 0; first < n; first += kPeakBlock)
        peaks[first / kPeakBlock] = peak_of(x + first, n - first < kPeakBlock ? n - first : kPeakBlock);
}

}  // namespace headrace::HR_ISA
