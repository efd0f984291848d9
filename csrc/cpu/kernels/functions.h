// exp and its relatives, lane by lane, as docs/numerics.md spells them.
#pragma once

#include "isa.h"

namespace headrace::HR_ISA {

// For x that are not above 88, or NaN.
HR_INLINE VF exp_below(VF x) {
    const VF clamped = max(bcast(-87.33f), x);
    const VI n = round_int(mul(clamped, bcast(1.44269504088896341f)));
    const VF nf = to_float(n);
    VF r = fma(nf, bcast(-0.693359375f), clamped);
    r = fma(nf, bcast(2.12194440e-4f), r);
    VF p = bcast(1.9875691500e-4f);
    p = fma(p, r, bcast(1.3981999507e-3f));
    p = fma(p, r, bcast(8.3334519073e-3f));
    p = fma(p, r, bcast(4.1665795894e-2f));
    p = fma(p, r, bcast(1.6666665459e-1f));
    p = fma(p, r, bcast(5.0000001201e-1f));
    p = fma(p, mul(r, r), r);
    p = add(p, bcast(1.0f));
    return select_lt(x, bcast(-87.33f), zero(), times_power(p, n, nf));
}

HR_INLINE VF exp(VF x) { return exp_below(min(bcast(88.0f), x)); }

HR_INLINE float first_of(VF x) {
    alignas(64) float lanes[N];
    store(lanes, x);
    return lanes[0];
}

HR_INLINE float exp1(float x) { return first_of(exp(bcast(x))); }

// 2^y to one part in 10^4, for y that are not far above zero, or NaN; zero or a subnormal number below -126.
HR_INLINE VF power_of_two(VF y) {
    y = max(bcast(-127.0f), y);
    // In the sum the lowest bits are round(y).
    const VF magic = bcast(12582912.0f), sum = add(y, magic), f = sub(y, sub(sum, magic));
    VF p = bcast(5.5008931534e-2f);
    p = fma(p, f, bcast(2.4221096483e-1f));
    p = fma(p, f, bcast(6.9328292767e-1f));
    p = fma(p, f, bcast(1.0f));
    return from_bits(iadd(bits(p), shift_left<23>(bits(sum))));
}

HR_INLINE VF tanh(VF x) {
    const VF e = exp(mul(bcast(2.0f), x));
    return sub(bcast(1.0f), div(bcast(2.0f), add(bcast(1.0f), e)));
}

HR_INLINE VF silu(VF x) { return div(x, add(bcast(1.0f), exp(neg(x)))); }

HR_INLINE VF gelu_tanh(VF x) {
    const VF cubic = mul(mul(bcast(0.044715f), x), x);
    const VF inner = mul(bcast(0.7978845608f), fma(cubic, x, x));
    return mul(mul(bcast(0.5f), x), add(bcast(1.0f), tanh(inner)));
}

HR_INLINE VF gelu(VF x) {
    const VF z = mul(x, bcast(0.7071067812f));
    const VF a = abs(z);
    const VF t = div(bcast(1.0f), fma(bcast(0.3275911f), a, bcast(1.0f)));
    VF p = bcast(1.061405429f);
    p = fma(p, t, bcast(-1.453152027f));
    p = fma(p, t, bcast(1.421413741f));
    p = fma(p, t, bcast(-0.284496736f));
    p = fma(p, t, bcast(0.254829592f));
    const VF magnitude = sub(bcast(1.0f), mul(mul(p, t), exp(neg(mul(z, z)))));
    const VF erf = select_lt(z, zero(), neg(magnitude), magnitude);
    return mul(mul(bcast(0.5f), x), add(bcast(1.0f), erf));
}

HR_INLINE VF activate(Activation activation, VF x) {
    switch (activation) {
        case Activation::Silu: return silu(x);
        case Activation::Gelu: return gelu(x);
        default: return gelu_tanh(x);
    }
}

HR_INLINE int part(int n, int i) {
    const int rest = n - i;
    return rest < 0 ? 0 : rest > N ? N : rest;
}

}  // namespace headrace::HR_ISA
