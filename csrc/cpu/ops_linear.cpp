// Products: linear, gated and logits.

#include <algorithm>

#include "ops.h"

namespace headrace {

namespace {

constexpr int kRowBlock = 128;       // rows whose activations stay in L2 while panels pass by
constexpr size_t kPieceBytes = 24 << 10;
constexpr int kGatedWidth = 32;      // columns of a gated piece: one quantisation group of the next product

// Panels of a piece: about kPieceBytes, more for very large matrices, and at least four pieces per thread if possible.
int panels_per_piece(const Segment& s, int threads) {
    const int by_size = int(kPieceBytes / s.stride), by_count = s.panels / (threads * 16), most = s.panels / (threads * 4);
    return std::max(1, std::min(std::max(by_size, by_count), std::max(1, most)));
}

GemmTask make_task(const ProductInput& input, const ActivationGroup* xq, const Segment& s, int first_panel, int panels,
                   int row_begin, int row_end) {
    GemmTask t{};
    t.format = s.format;
    t.wide_scales = s.wide_scales;
    t.k = input.width;
    t.panels = s.data + size_t(first_panel) * s.stride;
    t.panel_stride = s.stride;
    t.num_panels = panels;
    t.xq = xq;
    t.x = input.x;
    t.ldx = input.width;
    t.row_begin = row_begin;
    t.row_end = row_end;
    return t;
}

void multiply(const Kernels& kernels, const GemmTask& task, float* scratch) {
    if (task.xq) kernels.gemm_int(task);
    else kernels.gemm_float(task, scratch);
}

}  // namespace

void ProductInput::reserve(Team& team, const Sizes& most) const {
    if (norm) norm->reserve(team, most);
    if (!exact && !ready) team.reserve_shared(Shared::Activations, activation_bytes(count_rows(rows, most), width));
    team.reserve_scratch(kGemmFloatScratch);
}

const ActivationGroup* ProductInput::prepare(Team& team, int tid, int num_rows) const {
    if (exact) return nullptr;
    if (ready) return team.shared<ActivationGroup>(Shared::GatedActivations);
    auto* xq = team.shared<ActivationGroup>(Shared::Activations);
    const int groups = width / kGroup;
    const int step = std::clamp(num_rows / (team.size() * 4), 1, kTile);
    team.for_each(tid, (num_rows + step - 1) / step, [&](int64_t piece) {
        const int begin = int(piece) * step, end = std::min(num_rows, begin + step);
        for (int r = begin; r < end; ++r) {
            const float* row = x + int64_t(r) * width;
            if (norm) {
                norm->run_row(team.kernels(), r, team.scratch(tid));
                row = team.scratch(tid);
            }
            team.kernels().quantize(row, width, r, r + 1, 0, groups, groups, xq);
        }
    });
    return xq;
}

void LinearOp::reserve(Team& team, const Sizes& most) const { input.reserve(team, most); }

void LinearOp::run(Team& team, int tid, const Sizes& sizes) const {
    const int rows = count_rows(input.rows, sizes);
    const ActivationGroup* xq = input.prepare(team, tid, rows);
    const int blocks = (rows + kRowBlock - 1) / kRowBlock;
    for (const Segment& s : weight->segments) {
        const int step = panels_per_piece(s, team.size());
        const int pieces = (s.panels + step - 1) / step;
        team.for_each(tid, int64_t(pieces) * blocks, [&](int64_t i) {
            const int panel = int(i % pieces) * step, block = int(i / pieces) * kRowBlock;
            GemmTask t = make_task(input, xq, s, panel, std::min(step, s.panels - panel), block,
                                   std::min(rows, block + kRowBlock));
            const int col = s.first_row + panel * kPanel;
            t.out = out + col;
            t.ldo = weight->out_features;
            t.cols = std::min(t.num_panels * kPanel, s.rows - panel * kPanel);
            t.bias = bias ? bias + col : nullptr;
            t.softcap = softcap;
            multiply(team.kernels(), t, team.scratch(tid));
        });
    }
}

void GatedOp::reserve(Team& team, const Sizes& most) const {
    input.reserve(team, most);
    team.reserve_scratch(kGemmFloatScratch + 2 * kRowBlock * kGatedWidth);
    if (quantized_out)
        team.reserve_shared(Shared::GatedActivations,
                            activation_bytes(count_rows(input.rows, most), weight->segments[0].rows));
}

void GatedOp::run(Team& team, int tid, const Sizes& sizes) const {
    const int rows = count_rows(input.rows, sizes);
    const ActivationGroup* xq = input.prepare(team, tid, rows);
    const Segment &gate = weight->segments[0], &up = weight->segments[1];
    const int width = gate.rows, units = (width + kGatedWidth - 1) / kGatedWidth;
    const int blocks = (rows + kRowBlock - 1) / kRowBlock;
    const int tile = xq ? kTile : kRowBlock;  // integer panels stay in L1 while tiles pass by
    float* gate_tile = team.scratch(tid) + kGemmFloatScratch;
    float* up_tile = gate_tile + kRowBlock * kGatedWidth;
    auto* hidden = team.shared<ActivationGroup>(Shared::GatedActivations);
    team.for_each(tid, int64_t(units) * blocks, [&](int64_t i) {
        const int unit = int(i % units), block = int(i / units) * kRowBlock;
        const int panel = unit * (kGatedWidth / kPanel), panels = std::min(kGatedWidth / kPanel, gate.panels - panel);
        const int cols = std::min(kGatedWidth, width - unit * kGatedWidth);
        for (int row = block; row < std::min(rows, block + kRowBlock); row += tile) {
            const int end = std::min({rows, block + kRowBlock, row + tile});
            for (const bool is_gate : {true, false}) {
                GemmTask t = make_task(input, xq, is_gate ? gate : up, panel, panels, row, end);
                t.out = (is_gate ? gate_tile : up_tile) - int64_t(row) * kGatedWidth;
                t.ldo = kGatedWidth;
                t.cols = panels * kPanel;
                multiply(team.kernels(), t, team.scratch(tid));
            }
            for (int r = row; r < end; ++r) {
                float* g = gate_tile + (r - row) * kGatedWidth;
                float* to = quantized_out ? g : out + int64_t(r) * width + unit * kGatedWidth;
                team.kernels().gate(activation, g, up_tile + (r - row) * kGatedWidth, to, cols);
            }
            if (quantized_out)
                team.kernels().quantize(gate_tile, kGatedWidth, row, end, unit, unit + 1, width / kGroup, hidden);
        }
    });
}

}  // namespace headrace
