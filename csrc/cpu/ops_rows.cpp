// Ops that work row by row.

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "ops.h"

namespace headrace {

namespace {

// Rows of a piece: enough to pay for handing it out, few enough to share two rows between two threads.
int rows_per_piece(int rows, int threads) {
    const int share = rows / (threads * 4);
    return share < 1 ? 1 : share > 16 ? 16 : share;
}

// Calls stretch(begin, end) for pieces of the rows.
template <class F> void for_rows(Team& team, int tid, int rows, F&& stretch) {
    const int step = rows_per_piece(rows, team.size());
    team.for_each(tid, (rows + step - 1) / step, [&](int64_t piece) {
        stretch(int(piece) * step, std::min(rows, (int(piece) + 1) * step));
    });
}

}  // namespace

void EmbeddingOp::check(const Sizes& sizes) const {
    for (int t = 0; t < sizes.tokens; ++t)
        if (ids[t] < 0 || ids[t] >= table->out_features)
            throw std::out_of_range("token id " + std::to_string(ids[t]) + " at place " + std::to_string(t) +
                                    " is outside the table of " + std::to_string(table->out_features));
}

void EmbeddingOp::run(Team& team, int tid, const Sizes& sizes) const {
    for_rows(team, tid, sizes.tokens, [&](int begin, int end) { run_rows(team, tid, begin, end); });
}

void EmbeddingOp::run_rows(Team& team, int, int begin, int end) const {
    for (int t = begin; t < end; ++t) {
        int row = ids[t];
        const Segment* s = &table->segments[0];
        while (row >= s->first_row + s->rows) ++s;
        row -= s->first_row;
        team.kernels().embed(s->format, s->wide_scales, table->in_features, s->panel(row / kPanel),
                             row % kPanel, scale, out + int64_t(t) * table->in_features);
    }
}

void NormOp::reserve(Team& team, const Sizes&) const { team.reserve_scratch(size_t(width) + 16); }

void NormOp::run_row(const Kernels& kernels, int row, float* to) const {
    const int64_t at = int64_t(row) * width;
    kernels.rms_norm(x + at, residual ? residual + at : nullptr, weight, eps, width, to, sum_out ? sum_out + at : nullptr);
}

void NormOp::run(Team& team, int tid, const Sizes& sizes) const {
    for_rows(team, tid, count_rows(rows, sizes),
             [&](int begin, int end) { run_rows(team, tid, begin, end); });
}

void NormOp::run_rows(Team& team, int, int begin, int end) const {
    for (int r = begin; r < end; ++r) run_row(team.kernels(), r, out + int64_t(r) * width);
}

void AddOp::run(Team& team, int tid, const Sizes& sizes) const {
    for_rows(team, tid, count_rows(rows, sizes), [&](int begin, int end) { run_rows(team, tid, begin, end); });
}

void AddOp::run_rows(Team& team, int, int begin, int end) const {
    for (int r = begin; r < end; ++r) {
        const int64_t at = int64_t(r) * width;
        team.kernels().add(x + at, y + at, out + at, width);
    }
}

void GatherOp::check(const Sizes& sizes) const {
    for (int r = 0; r < sizes.logit_rows; ++r)
        if (index[r] < 0 || index[r] >= sizes.tokens)
            throw std::out_of_range("row " + std::to_string(index[r]) + " to gather is outside the step's " +
                                    std::to_string(sizes.tokens) + " tokens");
}

void GatherOp::run(Team& team, int tid, const Sizes& sizes) const {
    for_rows(team, tid, sizes.logit_rows, [&](int begin, int end) {
        for (int r = begin; r < end; ++r)
            std::memcpy(out + int64_t(r) * width, x + int64_t(index[r]) * width, size_t(width) * sizeof(float));
    });
}

void ArgMaxOp::run(Team& team, int tid, const Sizes& sizes) const {
    team.for_each(tid, sizes.logit_rows,
                  [&](int64_t r) { out[r] = team.kernels().arg_max(x + r * width, width); });
}

void Op::check_room(const Sizes& sizes) const {
    if (sizes.tokens < 0 || sizes.tokens > room.tokens || sizes.reqs < 0 || sizes.reqs > room.reqs || sizes.logit_rows < 0 ||
        sizes.logit_rows > room.logit_rows)
        throw std::out_of_range(std::string(name()) + " of " + std::to_string(sizes.tokens) + " tokens, " +
                                std::to_string(sizes.reqs) + " requests and " + std::to_string(sizes.logit_rows) +
                                " rows of logits does not fit its buffers");
}

void run_op(Team& team, const Op& op, const Sizes& sizes) {
    op.check_room(sizes);
    op.check(sizes);
    op.reserve(team, sizes);
    team.run([&](int tid) { op.run(team, tid, sizes); });
    team.advance();
}

}  // namespace headrace
