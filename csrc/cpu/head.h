// The head: logits of the rows that need them, reduced to the greatest one while they are still in the cache.
#pragma once

#include "ops.h"

namespace headrace {

// Every row gets the id and the value of its greatest logit; the first `Sizes::best_rows` rows get nothing else, so that
// their logits are never written. The logits of the other rows follow in `logits`, `ld` floats apart.
struct HeadOp : Op {
    ProductInput input;
    std::shared_ptr<Weight> weight;
    float softcap = 0;
    int32_t* best;
    float* peaks;
    float* logits;
    int64_t ld;
    int max_logits;  // rows of `logits`
    const char* name() const override { return "head"; }
    void check(const Sizes&) const override;
    std::vector<int64_t> check_key() const override { return {address(best), max_logits}; }
    void reserve(Team&, const Sizes& most) const override;
    void run(Team&, int tid, const Sizes&) const override;
    std::vector<const void*> reads() const override { return {input.x}; }
    std::vector<const void*> writes() const override { return {logits}; }

private:
    void run_piece(Team&, int tid, const Sizes&, const ActivationGroup* xq, const Segment&, int panel, int panels,
                   int row_begin, int row_end) const;
};

}  // namespace headrace
