// float16 in plain C++, rounded to nearest even. For units compiled for the baseline CPU only.
#pragma once

#include <cstdint>

namespace headrace {

inline float bits_to_float(uint32_t b) { return __builtin_bit_cast(float, b); }
inline uint32_t float_to_bits(float f) { return __builtin_bit_cast(uint32_t, f); }

inline float f16_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000 | (fraction << 13) | (fraction ? 0x400000 : 0));
    if (exponent == 0) {
        const float magnitude = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
        return bits_to_float(sign | float_to_bits(magnitude));
    }
    return bits_to_float(sign | ((exponent + 112) << 23) | (fraction << 13));
}

inline uint16_t float_to_f16(float f) {
    const uint32_t b = float_to_bits(f), sign = (b >> 16) & 0x8000, a = b & 0x7fffffff;
    if (a > 0x7f800000) return uint16_t(sign | 0x7e00 | ((a >> 13) & 0x3ff));
    if (a >= 0x47800000) return uint16_t(sign | 0x7c00);
    if (a < 0x38800000) {  // subnormal: adding 0.5 lets the adder round to a multiple of 2^-24
        const uint32_t rounded = float_to_bits(bits_to_float(a) + 0.5f) - float_to_bits(0.5f);
        return uint16_t(sign | rounded);
    }
    const uint32_t odd = (a >> 13) & 1;
    return uint16_t(sign | ((a - 0x38000000 + 0xfff + odd) >> 13));
}

}  // namespace headrace
