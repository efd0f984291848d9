// NEON with the dot-product extension: pairs of 128-bit vectors, sixteen of which fill the registers.
#pragma once

#include <arm_neon.h>

namespace headrace::HR_ISA {

constexpr int N = 8;
constexpr bool kManyRegisters = false;

struct VF {
    float32x4_t a, b;
};
struct VI {
    int32x4_t a, b;
};
struct U {
    uint8x16_t a, b;
};

HR_INLINE float32x4_t max4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
HR_INLINE float32x4_t min4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }

HR_INLINE VF zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
HR_INLINE VF bcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
HR_INLINE VF load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
HR_INLINE void store(float* p, VF x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
}
HR_INLINE VF load_part(const float* p, int n) {
    float lanes[8] = {};
    for (int i = 0; i < 8 && i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
HR_INLINE void store_part(float* p, VF x, int n) {
    float lanes[8];
    store(lanes, x);
    for (int i = 0; i < 8 && i < n; ++i) p[i] = lanes[i];
}
HR_INLINE VF add(VF x, VF y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
HR_INLINE VF sub(VF x, VF y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
HR_INLINE VF mul(VF x, VF y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
HR_INLINE VF div(VF x, VF y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
HR_INLINE VF fma(VF x, VF y, VF z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
// The second operand where one is a NaN, as on the other sets.
HR_INLINE VF max(VF x, VF y) { return {max4(x.a, y.a), max4(x.b, y.b)}; }
HR_INLINE VF min(VF x, VF y) { return {min4(x.a, y.a), min4(x.b, y.b)}; }
HR_INLINE VF neg(VF x) { return {vnegq_f32(x.a), vnegq_f32(x.b)}; }
HR_INLINE VF abs(VF x) { return {vabsq_f32(x.a), vabsq_f32(x.b)}; }
// x < y ? s : t, lane by lane (a NaN chooses t).
HR_INLINE VF select_lt(VF x, VF y, VF s, VF t) {
    return {vbslq_f32(vcltq_f32(x.a, y.a), s.a, t.a), vbslq_f32(vcltq_f32(x.b, y.b), s.b, t.b)};
}

HR_INLINE float tree_add(const VF (&w)[2]) {
    const VF eight = add(w[0], w[1]);
    const float32x4_t four = vaddq_f32(eight.a, eight.b);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
HR_INLINE float reduce_max(VF x) { return vmaxvq_f32(max4(x.a, x.b)); }

HR_INLINE VI ibcast(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
HR_INLINE VI iload(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4)}; }
HR_INLINE void store(int32_t* p, VI x) {
    vst1q_s32(p, x.a);
    vst1q_s32(p + 4, x.b);
}
HR_INLINE VI iota() {
    const int32_t lanes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    return iload(lanes);
}
HR_INLINE VI iadd(VI x, VI y) { return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b)}; }
HR_INLINE VI iand(VI x, VI y) { return {vandq_s32(x.a, y.a), vandq_s32(x.b, y.b)}; }
HR_INLINE VI imax(VI x, VI y) { return {vmaxq_s32(x.a, y.a), vmaxq_s32(x.b, y.b)}; }
HR_INLINE VI imin(VI x, VI y) { return {vminq_s32(x.a, y.a), vminq_s32(x.b, y.b)}; }
template <int n> HR_INLINE VI shift_left(VI x) { return {vshlq_n_s32(x.a, n), vshlq_n_s32(x.b, n)}; }
template <int n> HR_INLINE int32x4_t shift_right4(int32x4_t x) {
    if constexpr (n == 0) return x;
    else return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), n));
}
template <int n> HR_INLINE VI shift_right(VI x) { return {shift_right4<n>(x.a), shift_right4<n>(x.b)}; }
template <int n> HR_INLINE VI shift_right_signed(VI x) { return {vshrq_n_s32(x.a, n), vshrq_n_s32(x.b, n)}; }
HR_INLINE int32_t reduce_max(VI x) { return vmaxvq_s32(vmaxq_s32(x.a, x.b)); }
HR_INLINE int32_t reduce_add(VI x) { return vaddvq_s32(vaddq_s32(x.a, x.b)); }
HR_INLINE VF to_float(VI x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)}; }
// Out of range and NaN give the smallest integer, as on the other sets.
HR_INLINE int32x4_t round4(float32x4_t x) {
    return vbslq_s32(vcaltq_f32(x, vdupq_n_f32(2147483648.0f)), vcvtnq_s32_f32(x), vdupq_n_s32(INT32_MIN));
}
HR_INLINE VI round_int(VF x) { return {round4(x.a), round4(x.b)}; }
HR_INLINE VI bits(VF x) { return {vreinterpretq_s32_f32(x.a), vreinterpretq_s32_f32(x.b)}; }
HR_INLINE VF from_bits(VI x) { return {vreinterpretq_f32_s32(x.a), vreinterpretq_f32_s32(x.b)}; }
// a * 2^n for an n that a normal number's exponent holds; `nf` is n.
HR_INLINE VF times_power(VF a, VI n, VF) { return mul(a, from_bits(shift_left<23>(iadd(n, ibcast(127))))); }

HR_INLINE VF load_f16(const uint16_t* p) {
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}
HR_INLINE void store_f16(uint16_t* p, VF x) {
    vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)));
}
HR_INLINE VF load_bf16(const uint16_t* p) {
    const uint16x8_t h = vld1q_u16(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(h, 16))};
}
HR_INLINE VF load_i8(const int8_t* p) {
    const int16x8_t h = vmovl_s8(vld1_s8(p));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(h))), vcvtq_f32_s32(vmovl_high_s16(h))};
}
// N int32 in -128..127 to bytes.
HR_INLINE void store_i8(int8_t* p, VI x) { vst1_s8(p, vmovn_s16(vmovn_high_s32(vmovn_s32(x.a), x.b))); }

HR_INLINE U uload(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
HR_INLINE VI as_int(U x) { return {vreinterpretq_s32_u8(x.a), vreinterpretq_s32_u8(x.b)}; }
HR_INLINE U low_nibbles(U x) { return {vandq_u8(x.a, vdupq_n_u8(15)), vandq_u8(x.b, vdupq_n_u8(15))}; }
HR_INLINE U high_nibbles(U x) { return {vshrq_n_u8(x.a, 4), vshrq_n_u8(x.b, 4)}; }
// The 4 bits at `shift` of each lane as a float.
template <int shift> HR_INLINE VF nibble(VI x) { return to_float(iand(shift_right<shift>(x), ibcast(15))); }
HR_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
HR_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
// To be written soon: another core may have the line.
HR_INLINE void prefetch_write(const void* p) { __builtin_prefetch(p, 1, 3); }

HR_INLINE VI dot(VI s, U w, const int8_t* a) {
    const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(*(const int32_t __attribute__((may_alias, aligned(1)))*)a));
    return {vdotq_s32(s.a, vreinterpretq_s8_u8(w.a), x), vdotq_s32(s.b, vreinterpretq_s8_u8(w.b), x)};
}

struct Dot4 {
    VI s;
    HR_INLINE Dot4 start(int32_t) { return {ibcast(0)}; }
    HR_INLINE Dot4 step(Dot4 d, U w, const int8_t* a) { return {dot(d.s, w, a)}; }
    HR_INLINE VI finish(Dot4 d) { return d.s; }
};
struct Dot8 {
    VI s;
    HR_INLINE U prepare(U w) { return w; }
    HR_INLINE Dot8 start(int32_t) { return {ibcast(0)}; }
    HR_INLINE Dot8 step(Dot8 d, U w, const int8_t* a) { return {dot(d.s, w, a)}; }
    HR_INLINE VI finish(Dot8 d) { return d.s; }
};

}  // namespace headrace::HR_ISA
