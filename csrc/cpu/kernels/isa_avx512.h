// AVX-512 F/BW/VL/DQ, with VNNI and BF16 where the unit has them.
#pragma once

#include <immintrin.h>

namespace headrace::HR_ISA {

constexpr int N = 16;
constexpr bool kManyRegisters = true;

struct VF {
    __m512 v;
};
struct VI {
    __m512i v;
};
struct U {
    __m512i v;
};

HR_INLINE __mmask16 first(int n) { return n >= 16 ? __mmask16(0xffff) : __mmask16((1u << n) - 1u); }

HR_INLINE VF zero() { return {_mm512_setzero_ps()}; }
HR_INLINE VF bcast(float x) { return {_mm512_set1_ps(x)}; }
HR_INLINE VF load(const float* p) { return {_mm512_loadu_ps(p)}; }
HR_INLINE VF load_part(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
HR_INLINE void store(float* p, VF a) { _mm512_storeu_ps(p, a.v); }
HR_INLINE void store_part(float* p, VF a, int n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
HR_INLINE VF add(VF a, VF b) { return {_mm512_add_ps(a.v, b.v)}; }
HR_INLINE VF sub(VF a, VF b) { return {_mm512_sub_ps(a.v, b.v)}; }
HR_INLINE VF mul(VF a, VF b) { return {_mm512_mul_ps(a.v, b.v)}; }
HR_INLINE VF div(VF a, VF b) { return {_mm512_div_ps(a.v, b.v)}; }
HR_INLINE VF fma(VF a, VF b, VF c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
HR_INLINE VF max(VF a, VF b) { return {_mm512_max_ps(a.v, b.v)}; }
HR_INLINE VF min(VF a, VF b) { return {_mm512_min_ps(a.v, b.v)}; }
HR_INLINE VF neg(VF a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
HR_INLINE VF abs(VF a) { return {_mm512_andnot_ps(_mm512_set1_ps(-0.0f), a.v)}; }
// a < b ? x : y, lane by lane (a NaN chooses y).
HR_INLINE VF select_lt(VF a, VF b, VF x, VF y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}

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
HR_INLINE float tree_add(const VF (&w)[1]) {
    return tree_add8(_mm256_add_ps(_mm512_castps512_ps256(w[0].v), _mm512_extractf32x8_ps(w[0].v, 1)));
}
HR_INLINE float reduce_max(VF a) { return max8(_mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1))); }

// Lane i is what is left of row i: the same tree over the lanes of eight rows at once.
#define HR_TREES
template <class F>
HR_INLINE VF fold_rows(const VF (&w)[8], F&& fold) {
    __m512 halves[4], quarters[2];
    for (int i = 0; i < 4; ++i)
        halves[i] = fold(_mm512_shuffle_f32x4(w[2 * i].v, w[2 * i + 1].v, 0x44), _mm512_shuffle_f32x4(w[2 * i].v, w[2 * i + 1].v, 0xee));
    for (int i = 0; i < 2; ++i)
        quarters[i] = fold(_mm512_shuffle_f32x4(halves[2 * i], halves[2 * i + 1], 0x88),
                           _mm512_shuffle_f32x4(halves[2 * i], halves[2 * i + 1], 0xdd));
    const __m512 two = fold(_mm512_shuffle_ps(quarters[0], quarters[1], 0x44), _mm512_shuffle_ps(quarters[0], quarters[1], 0xee));
    const __m512 one = fold(two, _mm512_permute_ps(two, 0xb1));
    return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0), one)};
}

HR_INLINE VI ibcast(int32_t x) { return {_mm512_set1_epi32(x)}; }
HR_INLINE VI iload(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE void store(int32_t* p, VI a) { _mm512_storeu_si512(p, a.v); }
HR_INLINE VI iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
HR_INLINE VI iadd(VI a, VI b) { return {_mm512_add_epi32(a.v, b.v)}; }
HR_INLINE VI iand(VI a, VI b) { return {_mm512_and_si512(a.v, b.v)}; }
HR_INLINE VI imax(VI a, VI b) { return {_mm512_max_epi32(a.v, b.v)}; }
HR_INLINE VI imin(VI a, VI b) { return {_mm512_min_epi32(a.v, b.v)}; }
template <int n> HR_INLINE VI shift_left(VI a) { return {_mm512_slli_epi32(a.v, n)}; }
template <int n> HR_INLINE VI shift_right(VI a) { return {_mm512_srli_epi32(a.v, n)}; }
template <int n> HR_INLINE VI shift_right_signed(VI a) { return {_mm512_srai_epi32(a.v, n)}; }
HR_INLINE int32_t reduce_max(VI a) { return _mm512_reduce_max_epi32(a.v); }
HR_INLINE int32_t reduce_add(VI a) { return _mm512_reduce_add_epi32(a.v); }
HR_INLINE VF to_float(VI a) { return {_mm512_cvtepi32_ps(a.v)}; }
HR_INLINE VI round_int(VF a) { return {_mm512_cvtps_epi32(a.v)}; }
HR_INLINE VI bits(VF a) { return {_mm512_castps_si512(a.v)}; }
HR_INLINE VF from_bits(VI a) { return {_mm512_castsi512_ps(a.v)}; }
// a * 2^n for an n that a normal number's exponent holds; `nf` is n.
HR_INLINE VF times_power(VF a, VI, VF nf) { return {_mm512_scalef_ps(a.v, nf.v)}; }

HR_INLINE VF load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
HR_INLINE void store_f16(uint16_t* p, VF a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT)); }
HR_INLINE VF load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
HR_INLINE VF load_i8(const int8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
// N int32 in -128..127 to bytes.
HR_INLINE void store_i8(int8_t* p, VI a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }

HR_INLINE U uload(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE VI as_int(U a) { return {a.v}; }
HR_INLINE U low_nibbles(U a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
HR_INLINE U high_nibbles(U a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
// The 4 bits at `shift` of each lane as a float: a permutation looks at no more than the low bits of its index.
template <int shift> HR_INLINE VF nibble(VI a) {
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(a.v, shift), table)};
}
HR_INLINE __m512i four(const int8_t* a) { return _mm512_set1_epi32(*(const int32_t __attribute__((may_alias, aligned(1)))*)a); }
HR_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
// To the second level: more lines can be on their way than the first one has room for.
HR_INLINE void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
// To be written soon: another core may have the line.
HR_INLINE void prefetch_write(const void* p) { asm volatile("prefetchw %0" : : "m"(*(const char*)p)); }

#if defined(HR_ISA_AVX512VNNI)
// The compiler would load and broadcast apart; the instruction does both for nothing.
HR_INLINE __m512i dpbusd(__m512i sum, __m512i w, const int8_t* a) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const int32_t __attribute__((may_alias, aligned(1)))*)a));
    return sum;
}

struct Dot4 {
    __m512i s;
    HR_INLINE Dot4 start(int32_t) { return {_mm512_setzero_si512()}; }
    HR_INLINE Dot4 step(Dot4 d, U w, const int8_t* a) { return {dpbusd(d.s, w.v, a)}; }
    HR_INLINE VI finish(Dot4 d) { return {d.s}; }
};
struct Dot8 {
    __m512i s;
    HR_INLINE U prepare(U w) { return {_mm512_xor_si512(w.v, _mm512_set1_epi8(-128))}; }
    // `correction` is -128 times the sum of the activations that will be multiplied.
    HR_INLINE Dot8 start(int32_t correction) { return {_mm512_set1_epi32(correction)}; }
    HR_INLINE Dot8 step(Dot8 d, U w, const int8_t* a) { return {dpbusd(d.s, w.v, a)}; }
    HR_INLINE VI finish(Dot8 d) { return {d.s}; }
};
#else
struct Dot4 {
    __m512i s;  // int16 pairs
    HR_INLINE Dot4 start(int32_t) { return {_mm512_setzero_si512()}; }
    HR_INLINE Dot4 step(Dot4 d, U w, const int8_t* a) {
        return {_mm512_add_epi16(d.s, _mm512_maddubs_epi16(w.v, four(a)))};
    }
    HR_INLINE VI finish(Dot4 d) { return {_mm512_madd_epi16(d.s, _mm512_set1_epi16(1))}; }
};
struct Dot8 {
    __m512i s;
    HR_INLINE U prepare(U w) { return w; }
    HR_INLINE Dot8 start(int32_t) { return {_mm512_setzero_si512()}; }
    HR_INLINE Dot8 step(Dot8 d, U w, const int8_t* a) {
        const __m512i x = four(a);
        const __m512i moved = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w.v), _mm512_setzero_si512(), x);
        const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w.v), moved);
        return {_mm512_add_epi32(d.s, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
    }
    HR_INLINE VI finish(Dot8 d) { return {d.s}; }
};
#endif

#if defined(HR_ISA_AVX512BF16)
#define HR_BRAIN_PAIRS
// Two bfloat16 in each of N lanes.
struct VP {
    __m512i v;
};

HR_INLINE VP load_pairs(const void* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE void store_pairs(void* p, VP a) { _mm512_storeu_si512(p, a.v); }
HR_INLINE VP bcast_pair(const void* p) { return {_mm512_set1_epi32(*(const int32_t __attribute__((may_alias, aligned(2)))*)p)}; }
// Consecutive values: those of `low`, then those of `high`.
HR_INLINE VP pairs_in_row(VF low, VF high) { return {(__m512i)_mm512_cvtne2ps_pbh(high.v, low.v)}; }
// Lane i has even[i] and odd[i].
HR_INLINE VP pairs_of(VF even, VF odd) {
    const __m512i turn = _mm512_add_epi32(_mm512_set1_epi32(0x100000), _mm512_mullo_epi32(iota().v, _mm512_set1_epi32(0x10001)));
    return {_mm512_permutexvar_epi16(turn, pairs_in_row(even, odd).v)};
}
// acc + odd * odd, rounded, + even * even, rounded; takes subnormal numbers as zero and makes none.
HR_INLINE VF dot_pairs(VP a, VP b, VF acc) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)}; }
#endif

}  // namespace headrace::HR_ISA
