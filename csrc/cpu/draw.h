// Gumbel-max over a whole row: the noise that device/sampling/noise.py defines, bit by bit.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/table.h"

namespace headrace {

// The id with the largest double(x) + noise, the lowest of equals; -1 when x has no finite value.
int draw_token(const Kernels& kernels, const float* x, int n, uint64_t seed, uint64_t position);

// The same among some ids, ascending.
int draw_among(const float* x, const std::vector<int32_t>& ids, uint64_t seed, uint64_t position);

// The logarithm of noise.py.
double log_of(double x);

}  // namespace headrace
