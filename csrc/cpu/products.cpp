#include "products.h"

#include <algorithm>

namespace headrace {

namespace {

constexpr size_t kPieceBytes = 24 << 10;
constexpr size_t kLine = 64;
constexpr size_t kExpectedBytes = 8 << 10;
constexpr int kExpectedRows = 64;
constexpr int kUnitPanels = kGatedWidth / kPanel;

// `panels` panels from `panel`, which lie one after the other: within a pair, or anywhere when pairs follow each other.
// All fields are named: nothing needs to be cleared first.
GemmTask make_task(const Factor& x, const Segment& s, int panel, int panels, int row_begin, int row_end, float* out,
                   int64_t ldo, int cols, const float* bias, float softcap) {
    return {.format = s.format,
            .wide_scales = s.wide_scales,
            .k = x.k,
            .panels = s.panel(panel),
            .panel_stride = s.stride,
            .num_panels = std::min(panels, s.panels - panel),
            .xq = x.xq,
            .x = x.x,
            .ldx = x.k,
            .row_begin = row_begin,
            .row_end = row_end,
            .out = out,
            .ldo = ldo,
            .cols = cols,
            .bias = bias,
            .softcap = softcap};
}

void multiply(const Kernels& kernels, const GemmTask& task, float* scratch) {
    if (task.xq) kernels.gemm_int(task);
    else kernels.gemm_float(task, scratch);
}

}  // namespace

int panels_per_piece(const Segment& s, int threads, bool exact) {
    const int by_size = int(kPieceBytes / s.stride), by_count = s.panels / (threads * 16), most = s.panels / (threads * 4);
    // Exact products of few rows take panels in pairs.
    const int unit = exact ? 2 : 1, wanted = std::max(unit, std::min(std::max(by_size, by_count), most));
    // The thread with the most pieces should have as few panels as possible: a neighbour of the size may share them better.
    const auto longest = [&](int step) { return ((s.panels + step - 1) / step + threads - 1) / threads * step; };
    int best = wanted / unit * unit;
    for (int step = best; step <= wanted + wanted / 2; step += unit)
        if (longest(step) < longest(best)) best = step;
    for (int step = best - unit; step >= std::max(unit, wanted / 2); step -= unit)
        if (longest(step) < longest(best)) best = step;
    return best;
}

void expect_weights(const Segment& s, int panel) {
    if (panel >= s.panels) return;
    const uint8_t* front = s.panel(panel);
    for (size_t at = 0; at < kExpectedBytes; at += kLine) __builtin_prefetch(front + at, 0, 2);
}

void expect_rows(const Factor& x, int rows) {
    if (rows > kExpectedRows) return;
    const int groups = x.k / kGroup;
    for (int row = 0; row < rows; ++row) {
        if (x.xq)
            for (int g = 0; g < groups; ++g) __builtin_prefetch(&x.xq[row / kTile * groups + g].rows[row % kTile], 0, 2);
        else
            for (int k = 0; k < x.k; k += int(kLine / sizeof(float))) __builtin_prefetch(x.x + int64_t(row) * x.k + k, 0, 2);
    }
}

void linear_piece(Team& team, int tid, const Factor& x, const Segment& s, int panel, int panels, int row_begin, int row_end,
                  const LinearResult& to) {
    const int col = s.first_row + panel * kPanel;
    const GemmTask t = make_task(x, s, panel, panels, row_begin, row_end, to.out + col, to.ld,
                                 std::min(panels * kPanel, s.rows - panel * kPanel), to.bias ? to.bias + col : nullptr, to.softcap);
    multiply(team.kernels(), t, team.scratch(tid));
}

void gated_piece(Team& team, int tid, const Factor& x, const Weight& weight, Activation activation, int unit, int row_begin,
                 int row_end, const GatedResult& to) {
    const int width = weight.segments[0].rows, first_col = unit * kGatedWidth, cols = std::min(kGatedWidth, width - first_col);
    // Tiles of integer products keep their panels in L1; float ones widen panels once for all rows.
    const int tile = x.xq ? kTile : kRowBlock;
    float* tiles[2] = {team.scratch(tid) + kGemmFloatScratch, team.scratch(tid) + kGemmFloatScratch + kRowBlock * kGatedWidth};
    for (int row = row_begin; row < row_end;) {
        const int end = std::min(row_end, row / tile * tile + tile);
        for (int part = 0; part < 2; ++part) {
            const GemmTask t =
                make_task(x, weight.segments[part], unit * kUnitPanels, kUnitPanels, row, end,
                          tiles[part] - int64_t(row) * kGatedWidth, kGatedWidth, kUnitPanels * kPanel, nullptr, 0);
            multiply(team.kernels(), t, team.scratch(tid));
        }
        for (int r = row; r < end; ++r) {
            float* gate = tiles[0] + (r - row) * kGatedWidth;
            float* out = to.quantized ? gate : to.out + int64_t(r) * width + first_col;
            team.kernels().gate(activation, gate, tiles[1] + (r - row) * kGatedWidth, out, cols);
        }
        if (to.quantized)
            team.kernels().quantize(tiles[0], kGatedWidth, row, end, unit, unit + 1, width / kGroup, to.quantized);
        row = end;
    }
}

}  // namespace headrace
