// Products: linear, gated and logits.

#include <algorithm>

#include "ops.h"
#include "products.h"

namespace headrace {

void ProductInput::reserve(Team& team, const Sizes& most) const {
    if (norm) norm->reserve(team, most);
    const int num_rows = count_rows(rows, most);
    if (!exact && !ready) {
        team.reserve_shared(Shared::Activations, activation_bytes(num_rows, width));
        team.reserve_own(Own::Activations, activation_bytes(std::min(num_rows, kRowBlock), width));
    }
    team.reserve_scratch(kGemmFloatScratch);
}

void ProductInput::quantize_rows(Team& team, int tid, int begin, int end, int first, ActivationGroup* xq) const {
    const int groups = width / kGroup;
    for (int r = begin; r < end; ++r) {
        const float* row = x + int64_t(r) * width;
        if (norm) {
            norm->run_row(team.kernels(), r, team.scratch(tid));
            row = team.scratch(tid);
        }
        team.kernels().quantize(row, width, r - first, r - first + 1, 0, groups, groups, xq);
    }
}

const ActivationGroup* ProductInput::prepare_rows(Team& team, int tid, int begin, int end) const {
    if (exact) return nullptr;
    if (ready) return team.own<ActivationGroup>(tid, Own::GatedActivations);
    auto* xq = team.own<ActivationGroup>(tid, Own::Activations);
    quantize_rows(team, tid, begin, end, begin, xq);
    return xq;
}

const ActivationGroup* ProductInput::prepare(Team& team, int tid, int num_rows) const {
    if (exact) return nullptr;
    if (ready) return team.shared<ActivationGroup>(Shared::GatedActivations);
    auto* xq = team.shared<ActivationGroup>(Shared::Activations);
    const int step = std::clamp(num_rows / (team.size() * 4), 1, kTile);
    team.for_each(tid, (num_rows + step - 1) / step, [&](int64_t piece) {
        const int begin = int(piece) * step;
        quantize_rows(team, tid, begin, std::min(num_rows, begin + step), 0, xq);
    });
    return xq;
}

namespace {

// The piece with which a thread begins.
int64_t first_piece(const Team& team, int tid, int64_t pieces) { return (pieces * tid + team.size() - 1) / team.size(); }

}  // namespace

void LinearOp::reserve(Team& team, const Sizes& most) const { input.reserve(team, most); }

void LinearOp::run(Team& team, int tid, const Sizes& sizes) const {
    const int rows = count_rows(input.rows, sizes);
    const Segment& front = weight->segments[0];
    const int step = panels_per_piece(front, team.size(), input.exact);
    expect_weights(front, int(first_piece(team, tid, (front.panels + step - 1) / step)) * step);
    const ActivationGroup* xq = input.prepare(team, tid, rows);
    const int blocks = (rows + kRowBlock - 1) / kRowBlock;
    const Factor x{xq, input.x, input.width};
    expect_rows(x, rows);
    const LinearResult to{out, weight->out_features, bias, softcap};
    for (const Segment& s : weight->segments) {
        const int step = panels_per_piece(s, team.size(), input.exact);
        const int pieces = (s.panels + step - 1) / step;
        team.for_each(tid, int64_t(pieces) * blocks, [&](int64_t i) {
            const int block = int(i / pieces) * kRowBlock;
            linear_piece(team, tid, x, s, int(i % pieces) * step, step, block, std::min(rows, block + kRowBlock), to);
        });
    }
}

void LinearOp::run_rows(Team& team, int tid, int begin, int end) const {
    const ActivationGroup* xq = input.prepare_rows(team, tid, begin, end);
    const Factor x{xq, input.x + int64_t(begin) * input.width, input.width};
    const LinearResult to{out + int64_t(begin) * weight->out_features, weight->out_features, bias, softcap};
    for (const Segment& s : weight->segments) linear_piece(team, tid, x, s, 0, s.panels, 0, end - begin, to);
}

void GatedOp::reserve(Team& team, const Sizes& most) const {
    input.reserve(team, most);
    team.reserve_scratch(kGatedScratch);
    if (!quantized_out) return;
    const int rows = count_rows(input.rows, most), width = weight->segments[0].rows;
    team.reserve_shared(Shared::GatedActivations, activation_bytes(rows, width));
    team.reserve_own(Own::GatedActivations, activation_bytes(std::min(rows, kRowBlock), width));
}

void GatedOp::run(Team& team, int tid, const Sizes& sizes) const {
    const int rows = count_rows(input.rows, sizes);
    const int width = weight->segments[0].rows, units = gated_units(width);
    expect_weights(weight->segments[0], int(first_piece(team, tid, units)) * (kGatedWidth / kPanel));
    const ActivationGroup* xq = input.prepare(team, tid, rows);
    const int blocks = (rows + kRowBlock - 1) / kRowBlock;
    const Factor x{xq, input.x, input.width};
    expect_rows(x, rows);
    const GatedResult to{out, quantized_out ? team.shared<ActivationGroup>(Shared::GatedActivations) : nullptr};
    team.for_each(tid, int64_t(units) * blocks, [&](int64_t i) {
        const int block = int(i / units) * kRowBlock;
        gated_piece(team, tid, x, *weight, activation, int(i % units), block, std::min(rows, block + kRowBlock), to);
    });
}

void GatedOp::run_rows(Team& team, int tid, int begin, int end) const {
    const int width = weight->segments[0].rows, units = gated_units(width);
    const ActivationGroup* xq = input.prepare_rows(team, tid, begin, end);
    const Factor x{xq, input.x + int64_t(begin) * input.width, input.width};
    const GatedResult to{out + int64_t(begin) * width,
                         quantized_out ? team.own<ActivationGroup>(tid, Own::GatedActivations) : nullptr};
    for (int unit = 0; unit < units; ++unit) gated_piece(team, tid, x, *weight, activation, unit, 0, end - begin, to);
}

}  // namespace headrace
