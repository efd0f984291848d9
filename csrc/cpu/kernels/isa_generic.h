// Plain C++: the twin that every other set is compared with, and the fallback for CPUs without one of them.
#pragma once

#include "../half.h"

namespace headrace::HR_ISA {

constexpr int N = 16;
constexpr bool kManyRegisters = false;

struct VF {
    float v[16];
};
struct VI {
    int32_t v[16];
};
struct U {
    uint8_t v[64];
};

#define HR_LANES(expression)            \
    for (int i = 0; i < 16; ++i) r.v[i] = (expression); \
    return r

HR_INLINE VF zero() { VF r; HR_LANES(0.0f); }
HR_INLINE VF bcast(float x) { VF r; HR_LANES(x); }
HR_INLINE VF load(const float* p) { VF r; HR_LANES(p[i]); }
HR_INLINE VF load_part(const float* p, int n) { VF r; HR_LANES(i < n ? p[i] : 0.0f); }
HR_INLINE void store(float* p, VF a) { for (int i = 0; i < 16; ++i) p[i] = a.v[i]; }
HR_INLINE void store_part(float* p, VF a, int n) { for (int i = 0; i < 16 && i < n; ++i) p[i] = a.v[i]; }
HR_INLINE VF add(VF a, VF b) { VF r; HR_LANES(a.v[i] + b.v[i]); }
HR_INLINE VF sub(VF a, VF b) { VF r; HR_LANES(a.v[i] - b.v[i]); }
HR_INLINE VF mul(VF a, VF b) { VF r; HR_LANES(a.v[i] * b.v[i]); }
HR_INLINE VF div(VF a, VF b) { VF r; HR_LANES(a.v[i] / b.v[i]); }
HR_INLINE VF fma(VF a, VF b, VF c) { VF r; HR_LANES(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
HR_INLINE VF max(VF a, VF b) { VF r; HR_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
HR_INLINE VF min(VF a, VF b) { VF r; HR_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
HR_INLINE VF neg(VF a) { VF r; HR_LANES(-a.v[i]); }
HR_INLINE VF abs(VF a) { VF r; HR_LANES(bits_to_float(float_to_bits(a.v[i]) & 0x7fffffff)); }
HR_INLINE VF select_lt(VF a, VF b, VF x, VF y) { VF r; HR_LANES(a.v[i] < b.v[i] ? x.v[i] : y.v[i]); }

HR_INLINE float tree_add(const VF (&w)[1]) {
    float t[16];
    for (int j = 0; j < 16; ++j) t[j] = w[0].v[j];
    for (int step = 8; step > 0; step /= 2)
        for (int j = 0; j < step; ++j) t[j] = t[j] + t[j + step];
    return t[0];
}
HR_INLINE float reduce_max(VF a) {
    float m = a.v[0];
    for (int i = 1; i < 16; ++i) m = a.v[i] > m ? a.v[i] : m;
    return m;
}

HR_INLINE VI ibcast(int32_t x) { VI r; HR_LANES(x); }
HR_INLINE VI iload(const int32_t* p) { VI r; HR_LANES(p[i]); }
HR_INLINE void store(int32_t* p, VI a) { for (int i = 0; i < 16; ++i) p[i] = a.v[i]; }
HR_INLINE VI iota() { VI r; HR_LANES(i); }
HR_INLINE VI iadd(VI a, VI b) { VI r; HR_LANES(int32_t(uint32_t(a.v[i]) + uint32_t(b.v[i]))); }
HR_INLINE VI iand(VI a, VI b) { VI r; HR_LANES(a.v[i] & b.v[i]); }
HR_INLINE VI imax(VI a, VI b) { VI r; HR_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
HR_INLINE VI imin(VI a, VI b) { VI r; HR_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
template <int n> HR_INLINE VI shift_left(VI a) { VI r; HR_LANES(int32_t(uint32_t(a.v[i]) << n)); }
template <int n> HR_INLINE VI shift_right(VI a) { VI r; HR_LANES(int32_t(uint32_t(a.v[i]) >> n)); }
template <int n> HR_INLINE VI shift_right_signed(VI a) { VI r; HR_LANES(a.v[i] >> n); }
HR_INLINE int32_t reduce_max(VI a) {
    int32_t m = a.v[0];
    for (int i = 1; i < 16; ++i) m = a.v[i] > m ? a.v[i] : m;
    return m;
}
HR_INLINE int32_t reduce_add(VI a) {
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += a.v[i];
    return sum;
}
HR_INLINE VF to_float(VI a) { VF r; HR_LANES(float(a.v[i])); }
HR_INLINE VI round_int(VF a) {
    VI r;
    // Out of range and NaN give the smallest integer, as x86 does.
    HR_LANES(a.v[i] > -2147483648.0f && a.v[i] < 2147483648.0f ? int32_t(__builtin_rintf(a.v[i])) : INT32_MIN);
}
HR_INLINE VI bits(VF a) { VI r; HR_LANES(int32_t(float_to_bits(a.v[i]))); }
HR_INLINE VF from_bits(VI a) { VF r; HR_LANES(bits_to_float(uint32_t(a.v[i]))); }
// a * 2^n for an n that a normal number's exponent holds; `nf` is n.
HR_INLINE VF times_power(VF a, VI n, VF) { return mul(a, from_bits(shift_left<23>(iadd(n, ibcast(127))))); }

HR_INLINE VF load_f16(const uint16_t* p) { VF r; HR_LANES(f16_to_float(p[i])); }
HR_INLINE void store_f16(uint16_t* p, VF a) { for (int i = 0; i < 16; ++i) p[i] = float_to_f16(a.v[i]); }
HR_INLINE VF load_bf16(const uint16_t* p) { VF r; HR_LANES(bits_to_float(uint32_t(p[i]) << 16)); }
HR_INLINE VF load_i8(const int8_t* p) { VF r; HR_LANES(float(p[i])); }
HR_INLINE void store_i8(int8_t* p, VI a) { for (int i = 0; i < 16; ++i) p[i] = int8_t(a.v[i]); }

HR_INLINE U uload(const uint8_t* p) { U r; for (int i = 0; i < 64; ++i) r.v[i] = p[i]; return r; }
HR_INLINE VI as_int(U a) { VI r; __builtin_memcpy(&r, &a, 64); return r; }
HR_INLINE U low_nibbles(U a) { U r; for (int i = 0; i < 64; ++i) r.v[i] = a.v[i] & 15; return r; }
HR_INLINE U high_nibbles(U a) { U r; for (int i = 0; i < 64; ++i) r.v[i] = a.v[i] >> 4; return r; }
// The 4 bits at `shift` of each lane as a float.
template <int shift> HR_INLINE VF nibble(VI a) { return to_float(iand(shift_right<shift>(a), ibcast(15))); }
HR_INLINE void prefetch(const void*) {}
HR_INLINE void prefetch_far(const void*) {}
HR_INLINE void prefetch_write(const void*) {}

struct Dot4 {
    VI s;
    HR_INLINE Dot4 start(int32_t) { return {ibcast(0)}; }
    HR_INLINE Dot4 step(Dot4 d, U w, const int8_t* a) {
        for (int i = 0; i < 16; ++i)
            for (int k = 0; k < 4; ++k) d.s.v[i] += int32_t(w.v[4 * i + k]) * a[k];
        return d;
    }
    HR_INLINE VI finish(Dot4 d) { return d.s; }
};
struct Dot8 {
    VI s;
    HR_INLINE U prepare(U w) { return w; }
    HR_INLINE Dot8 start(int32_t) { return {ibcast(0)}; }
    HR_INLINE Dot8 step(Dot8 d, U w, const int8_t* a) {
        for (int i = 0; i < 16; ++i)
            for (int k = 0; k < 4; ++k) d.s.v[i] += int32_t(int8_t(w.v[4 * i + k])) * a[k];
        return d;
    }
    HR_INLINE VI finish(Dot8 d) { return d.s; }
};

#undef HR_LANES

}  // namespace headrace::HR_ISA
