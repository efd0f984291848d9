// Vectors of the instruction set that this unit is compiled for.
//
// `VF` holds N float lanes, `VI` N int32 lanes, `U` the bytes of N outputs x 4 k-steps. All operations are exactly
// rounded and mean the same on every set, so kernels written over them give the same bits. `Dot4` and `Dot8` are the
// exact integer products of 4-bit (unsigned) and 8-bit (signed) weights with int8 activations.
//
// This header and everything below it must stay free of inline library functions: they would be compiled for a newer
// CPU here and could be chosen by the linker for all units.
#pragma once

#include <stdint.h>

#define HR_INLINE static inline __attribute__((always_inline))
// A function of its own, so that its registers are not shared with its caller's.
#define HR_KERNEL static __attribute__((noinline))

#if defined(HR_ISA_AVX512BF16)
#define HR_ISA avx512_bf16
#define HR_ISA_NAME "avx512_bf16"
#define HR_ISA_AVX512VNNI
#include "isa_avx512.h"
#elif defined(HR_ISA_AVX512VNNI)
#define HR_ISA avx512_vnni
#define HR_ISA_NAME "avx512_vnni"
#include "isa_avx512.h"
#elif defined(HR_ISA_AVX512)
#define HR_ISA avx512
#define HR_ISA_NAME "avx512"
#include "isa_avx512.h"
#elif defined(HR_ISA_AVX2)
#define HR_ISA avx2
#define HR_ISA_NAME "avx2"
#include "isa_avx2.h"
#elif defined(HR_ISA_NEON)
#define HR_ISA neon
#define HR_ISA_NAME "neon"
#include "isa_neon.h"
#else
#define HR_ISA generic
#define HR_ISA_NAME "generic"
#include "isa_generic.h"
#endif

namespace headrace::HR_ISA {

// Sixteen virtual lanes, the unit of every reduction.
struct W16 {
    VF v[16 / N];
};

// The tree of docs/numerics.md over the sixteen lanes.
HR_INLINE float reduce_add(const W16& w) { return tree_add(w.v); }

// Lane i is the sum of row i, as above; the greatest of row i.
template <int rows>
HR_INLINE VF reduce_add_rows(const W16 (&w)[rows]) {
    static_assert(rows <= 8);
#if defined(HR_TREES)
    VF all[8];
    for (int i = 0; i < 8; ++i) all[i] = w[i < rows ? i : 0].v[0];
    return fold_rows(all, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
#else
    float sums[N] = {};
    for (int i = 0; i < rows; ++i) sums[i] = reduce_add(w[i]);
    return load(sums);
#endif
}
template <int rows>
HR_INLINE VF reduce_max_rows(const VF (&w)[rows]) {
    static_assert(rows <= 8);
#if defined(HR_TREES)
    VF all[8];
    for (int i = 0; i < 8; ++i) all[i] = w[i < rows ? i : 0];
    return fold_rows(all, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
#else
    float tops[N] = {};
    for (int i = 0; i < rows; ++i) tops[i] = reduce_max(w[i]);
    return load(tops);
#endif
}

}  // namespace headrace::HR_ISA
