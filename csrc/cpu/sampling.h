// Choosing a token from one row of logits, and what it cost: the native twins of device/sampling, bit by bit.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "kernels/table.h"

namespace headrace {

// Filters of a row that is scaled so that its greatest value is zero. Off: 0, minus infinity, 1.
struct Filters {
    int top_k;
    float least;  // min_p as a difference of scaled logits
    double top_p;
    bool any(int n) const { return (top_k > 0 && top_k < n) || least > -__builtin_inff() || top_p < 1; }
};

// Ids that survive, ascending. Throws std::domain_error for a row that holds infinity or a NaN, as does the next one.
std::vector<int32_t> find_survivors(const Kernels& kernels, const float* x, int n, const Filters& filters);

// What a row's distribution is made of, and whose noise decides.
struct Draw {
    float peak;  // the greatest value of the row, which becomes zero
    float temperature;
    Filters filters;
    uint64_t seed, position;
};

// A token of a row, which is not changed.
int draw_row(const Kernels& kernels, const float* x, int n, const Draw& how);

// The log-probability and rank of a token of a raw row, and those of the `num_best` best ones behind it: ids, values, rank.
std::tuple<std::vector<int32_t>, std::vector<double>, int> token_logprobs(const Kernels& kernels, const float* x, int n, int token,
                                                                           int num_best);

}  // namespace headrace
