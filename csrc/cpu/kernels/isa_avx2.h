// AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

namespace headrace::HR_ISA {

constexpr int N = 8;
constexpr bool kManyRegisters = false;

struct VF {
    __m256 v;
};
struct VI {
    __m256i v;
};
struct U {
    __m256i v;
};

alignas(64) static const int32_t kMasks[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
HR_INLINE __m256i first(int n) { return _mm256_loadu_si256((const __m256i*)(kMasks + 8 - (n > 8 ? 8 : n))); }

HR_INLINE VF zero() { return {_mm256_setzero_ps()}; }
HR_INLINE VF bcast(float x) { return {_mm256_set1_ps(x)}; }
HR_INLINE VF load(const float* p) { return {_mm256_loadu_ps(p)}; }
HR_INLINE VF load_part(const float* p, int n) { return {_mm256_maskload_ps(p, first(n))}; }
HR_INLINE void store(float* p, VF a) { _mm256_storeu_ps(p, a.v); }
HR_INLINE void store_part(float* p, VF a, int n) { _mm256_maskstore_ps(p, first(n), a.v); }
HR_INLINE VF add(VF a, VF b) { return {_mm256_add_ps(a.v, b.v)}; }
HR_INLINE VF sub(VF a, VF b) { return {_mm256_sub_ps(a.v, b.v)}; }
HR_INLINE VF mul(VF a, VF b) { return {_mm256_mul_ps(a.v, b.v)}; }
HR_INLINE VF div(VF a, VF b) { return {_mm256_div_ps(a.v, b.v)}; }
HR_INLINE VF fma(VF a, VF b, VF c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
HR_INLINE VF max(VF a, VF b) { return {_mm256_max_ps(a.v, b.v)}; }
HR_INLINE VF min(VF a, VF b) { return {_mm256_min_ps(a.v, b.v)}; }
HR_INLINE VF neg(VF a) { return {_mm256_xor_ps(a.v, _mm256_set1_ps(-0.0f))}; }
HR_INLINE VF abs(VF a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
HR_INLINE VF select_lt(VF a, VF b, VF x, VF y) { return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))}; }

HR_INLINE float tree_add8(__m256 t) {
    __m128 u = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
    u = _mm_add_ps(u, _mm_movehl_ps(u, u));
    return _mm_cvtss_f32(_mm_add_ss(u, _mm_movehdup_ps(u)));
}
HR_INLINE float max8(__m256 t) {
    __m128 u = _mm_max_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
    u = _mm_max_ps(u, _mm_movehl_ps(u, u));
    return _mm_cvtss_f32(_mm_max_ss(u, _mm_movehdup_ps(u)));
}
HR_INLINE float tree_add(const VF (&w)[2]) { return tree_add8(_mm256_add_ps(w[0].v, w[1].v)); }
HR_INLINE float reduce_max(VF a) { return max8(a.v); }

HR_INLINE VI ibcast(int32_t x) { return {_mm256_set1_epi32(x)}; }
HR_INLINE VI iload(const int32_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
HR_INLINE void store(int32_t* p, VI a) { _mm256_storeu_si256((__m256i*)p, a.v); }
HR_INLINE VI iota() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)}; }
HR_INLINE VI iadd(VI a, VI b) { return {_mm256_add_epi32(a.v, b.v)}; }
HR_INLINE VI iand(VI a, VI b) { return {_mm256_and_si256(a.v, b.v)}; }
HR_INLINE VI imax(VI a, VI b) { return {_mm256_max_epi32(a.v, b.v)}; }
HR_INLINE VI imin(VI a, VI b) { return {_mm256_min_epi32(a.v, b.v)}; }
template <int n> HR_INLINE VI shift_left(VI a) { return {_mm256_slli_epi32(a.v, n)}; }
template <int n> HR_INLINE VI shift_right(VI a) { return {_mm256_srli_epi32(a.v, n)}; }
template <int n> HR_INLINE VI shift_right_signed(VI a) { return {_mm256_srai_epi32(a.v, n)}; }
HR_INLINE int32_t reduce_max(VI a) {
    __m128i t = _mm_max_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
    t = _mm_max_epi32(t, _mm_unpackhi_epi64(t, t));
    return _mm_cvtsi128_si32(_mm_max_epi32(t, _mm_shuffle_epi32(t, 1)));
}
HR_INLINE int32_t reduce_add(VI a) {
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
    t = _mm_add_epi32(t, _mm_unpackhi_epi64(t, t));
    return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 1)));
}
HR_INLINE VF to_float(VI a) { return {_mm256_cvtepi32_ps(a.v)}; }
HR_INLINE VI round_int(VF a) { return {_mm256_cvtps_epi32(a.v)}; }
HR_INLINE VI bits(VF a) { return {_mm256_castps_si256(a.v)}; }
HR_INLINE VF from_bits(VI a) { return {_mm256_castsi256_ps(a.v)}; }
// a * 2^n for an n that a normal number's exponent holds; `nf` is n.
HR_INLINE VF times_power(VF a, VI n, VF) { return mul(a, from_bits(shift_left<23>(iadd(n, ibcast(127))))); }

HR_INLINE VF load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
HR_INLINE void store_f16(uint16_t* p, VF a) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT)); }
HR_INLINE VF load_bf16(const uint16_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16))};
}
HR_INLINE VF load_i8(const int8_t* p) { return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)))}; }
HR_INLINE void store_i8(int8_t* p, VI a) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}

HR_INLINE U uload(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
HR_INLINE VI as_int(U a) { return {a.v}; }
HR_INLINE U low_nibbles(U a) { return {_mm256_and_si256(a.v, _mm256_set1_epi8(15))}; }
HR_INLINE U high_nibbles(U a) { return {_mm256_and_si256(_mm256_srli_epi16(a.v, 4), _mm256_set1_epi8(15))}; }
// The 4 bits at `shift` of each lane as a float.
template <int shift> HR_INLINE VF nibble(VI a) { return to_float(iand(shift_right<shift>(a), ibcast(15))); }
HR_INLINE __m256i four(const int8_t* a) { return _mm256_set1_epi32(*(const int32_t __attribute__((may_alias, aligned(1)))*)a); }
HR_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
// To the second level: more lines can be on their way than the first one has room for.
HR_INLINE void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
// To be written soon: another core may have the line.
HR_INLINE void prefetch_write(const void* p) { asm volatile("prefetchw %0" : : "m"(*(const char*)p)); }

struct Dot4 {
    __m256i s;  // int16 pairs: eight steps of at most 2 * 15 * 127 fit
    HR_INLINE Dot4 start(int32_t) { return {_mm256_setzero_si256()}; }
    HR_INLINE Dot4 step(Dot4 d, U w, const int8_t* a) {
        return {_mm256_add_epi16(d.s, _mm256_maddubs_epi16(w.v, four(a)))};
    }
    HR_INLINE VI finish(Dot4 d) { return {_mm256_madd_epi16(d.s, _mm256_set1_epi16(1))}; }
};
struct Dot8 {
    __m256i s;
    HR_INLINE U prepare(U w) { return w; }
    HR_INLINE Dot8 start(int32_t) { return {_mm256_setzero_si256()}; }
    HR_INLINE Dot8 step(Dot8 d, U w, const int8_t* a) {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w.v), _mm256_sign_epi8(four(a), w.v));
        return {_mm256_add_epi32(d.s, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
    }
    HR_INLINE VI finish(Dot8 d) { return {d.s}; }
};

}  // namespace headrace::HR_ISA
