// The greatest logit of each row of a tile.
#pragma once

#include "rows.h"

namespace headrace::HR_ISA {

// A NaN counts as infinity: either way the row has no answer.
HR_INLINE VF finite_or_infinity(VF x) { return select_lt(x, bcast(__builtin_inff()), x, bcast(__builtin_inff())); }

static float peak_of(const float* x, int n) {
    VF top = bcast(-__builtin_inff());
    int i = 0;
    for (; i + N <= n; i += N) top = max(top, finite_or_infinity(load(x + i)));
    float peak = reduce_max(top);
    for (; i < n; ++i)
        if (!(x[i] <= peak)) peak = x[i] < __builtin_inff() ? x[i] : __builtin_inff();
    return peak;
}

static void find_best(const float* tile, int64_t ld, int rows, int cols, int first_id, Best* best) {
    for (int r = 0; r < rows; ++r, tile += ld) {
        const float peak = peak_of(tile, cols);
        if (peak < best[r].value || (peak == best[r].value && first_id > best[r].id)) continue;
        int at = 0;
        while (tile[at] < peak) ++at;
        best[r] = {peak, first_id + at};
    }
}

}  // namespace headrace::HR_ISA
