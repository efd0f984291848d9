// What attention multiplies: numbers as they are, or rounded to bfloat16 and taken in pairs.
//
// Pairs are multiplied as one instruction does it where there is one: first what is odd, then what is even. Other units make two
// steps of it in that order over rounded numbers, which they keep as floats.
#pragma once

#include "rows.h"

namespace headrace::HR_ISA {

// One step multiplies `step` numbers in a row; the i-th one begins with number at(i * step) of keys, of values or of factors.
struct Exact {
    using Factor = float;
    using Vector = VF;
    static constexpr bool rounded = false;
    static constexpr int step = 1;
    HR_INLINE int at(int i) { return i; }
    // Of N tokens; `stride` leads to the next dimension.
    template <class T> HR_INLINE VF keys(const T* p, int64_t) { return load_weight(p); }
    // Dimensions d.. of token j.
    template <class T> HR_INLINE VF values(const T* const* tokens, int j, int d) { return load_weight(tokens[j] + d); }
    HR_INLINE VF bcast(const float* p) { return HR_ISA::bcast(*p); }
    HR_INLINE VF multiply(VF a, VF b, VF sum) { return fma(a, b, sum); }
};

#if defined(HR_BRAIN_PAIRS)
struct Rounded {
    struct Factor {
        uint16_t bits;
    };
    using Vector = VP;
    static constexpr bool rounded = true;
    static constexpr int step = 2;
    HR_INLINE int at(int i) { return i; }
    template <class T> HR_INLINE VP keys(const T* p, int64_t stride) { return pairs_of(load_weight(p), load_weight(p + stride)); }
    HR_INLINE VP keys(const Factor* p, int64_t) { return load_pairs(p); }
    template <class T> HR_INLINE VP values(const T* const* tokens, int j, int d) {
        return pairs_of(load_weight(tokens[j] + d), load_weight(tokens[j + 1] + d));
    }
    HR_INLINE VP values(const Factor* const* tokens, int j, int d) { return load_pairs(tokens[j] + d * step); }
    HR_INLINE VP bcast(const Factor* p) { return bcast_pair(p); }
    HR_INLINE VF multiply(VP a, VP b, VF sum) { return dot_pairs(a, b, sum); }
    HR_INLINE void store(Factor* p, VP a) { store_pairs(p, a); }

    // Rounds n values in a row.
    HR_INLINE void round(const float* x, int n, Factor* out) {
        for (int i = 0; i < n; i += 2 * N) {
            const VP all = pairs_in_row(load_part(x + i, part(n, i)), load_part(x + i + N, part(n, i + N)));
            _mm512_mask_storeu_epi16(out + i, n - i >= 2 * N ? ~0u : (1u << (n - i)) - 1u, all.v);
        }
    }
    // Rounds the values of a range; returns sixteen sums of them.
    HR_INLINE W16 round_range(const VF* x, Factor* out) {
        const VP ones = {_mm512_set1_epi16(0x3f80)};
        W16 sum = {zero()};
        for (int v = 0; v < kRange / N; v += 2) {
            const VP all = pairs_in_row(x[v], x[v + 1]);
            store_pairs(out + v * N, all);
            sum.v[0] = dot_pairs(all, ones, sum.v[0]);
        }
        return sum;
    }
};
#else
struct Rounded {
    struct Factor {
        float value;
    };
    using Vector = VF;
    static constexpr bool rounded = true;
    static constexpr int step = 1;
    HR_INLINE int at(int i) { return i ^ 1; }

    // Eight significant bits, to nearest even; nothing subnormal.
    HR_INLINE VF cut(VF x) {
        x = select_lt(HR_ISA::abs(x), HR_ISA::bcast(__FLT_MIN__), zero(), x);
        const VI b = bits(x), odd = iand(shift_right<16>(b), ibcast(1));
        const VF to_nearest = from_bits(iand(iadd(b, iadd(odd, ibcast(0x7fff))), ibcast(int32_t(0xffff0000))));
        return select_lt(HR_ISA::abs(x), HR_ISA::bcast(__builtin_inff()), to_nearest, x);
    }
    HR_INLINE VF load(const float* p) { return cut(HR_ISA::load(p)); }
    // A difference that loses the bits; exactly so for every float16.
    HR_INLINE VF load(const Half* p) {
        const VF x = load_weight(p), wide = mul(x, HR_ISA::bcast(65537.0f));
        return sub(wide, sub(wide, x));
    }
    HR_INLINE VF load(const int8_t* p) { return load_weight(p); }
    HR_INLINE VF load(const Factor* p) { return HR_ISA::load(&p->value); }

    template <class T> HR_INLINE VF keys(const T* p, int64_t) { return load(p); }
    template <class T> HR_INLINE VF values(const T* const* tokens, int j, int d) { return load(tokens[j] + d); }
    HR_INLINE VF bcast(const Factor* p) { return HR_ISA::bcast(p->value); }
    HR_INLINE VF multiply(VF a, VF b, VF sum) { return fma(a, b, sum); }
    HR_INLINE void store(Factor* p, VF a) { HR_ISA::store(&p->value, a); }

    HR_INLINE void round(const float* x, int n, Factor* out) {
        for (int i = 0; i < n; i += N) store_part(&out[i].value, cut(load_part(x + i, part(n, i))), part(n, i));
    }
    HR_INLINE W16 round_range(const VF* x, Factor* out) {
        for (int v = 0; v < kRange / N; ++v) store(out + v * N, cut(x[v]));
        alignas(64) float lanes[16];
        for (int i = 0; i < 16; ++i) {
            const Factor *low = out + 2 * i, *high = low + kRange / 2;
            lanes[i] = ((low[1].value + low[0].value) + high[1].value) + high[0].value;
        }
        W16 sum;
        for (int v = 0; v < 16 / N; ++v) sum.v[v] = HR_ISA::load(lanes + v * N);
        return sum;
    }
};
#endif

// Takes subnormal numbers as zero and makes none, as the instruction for pairs does whatever the mode.
class NoSubnormals {
public:
#if defined(__x86_64__)
    NoSubnormals() : before(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before | 0x8040); }
    ~NoSubnormals() { __builtin_ia32_ldmxcsr(before); }

private:
    unsigned before;
#elif defined(__aarch64__)
    NoSubnormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" : : "r"(before | 1ull << 24) : "memory");
    }
    ~NoSubnormals() { asm volatile("msr fpcr, %0" : : "r"(before) : "memory"); }

private:
    uint64_t before;
#endif
};

}  // namespace headrace::HR_ISA
