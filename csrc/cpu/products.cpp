#include "products.h"

#include <algorithm>

namespace headrace {

namespace {

constexpr size_t kPieceBytes = 24 << 10;

// `panels` panels from `panel`, which lie one after the other: within a pair, or anywhere when pairs follow each other.
GemmTask make_task(const Factor& x, const Segment& s, int panel, int panels, int row_begin, int row_end) {
    GemmTask t{};
    t.format = s.format;
    t.wide_scales = s.wide_scales;
    t.k = x.k;
    t.panels = s.panel(panel);
    t.panel_stride = s.stride;
    t.num_panels = std::min(panels, s.panels - panel);
    t.xq = x.xq;
    t.x = x.x;
    t.ldx = x.k;
    t.row_begin = row_begin;
    t.row_end = row_end;
    return t;
}

void multiply(const Kernels& kernels, const GemmTask& task, float* scratch) {
    if (task.xq) kernels.gemm_int(task);
    else kernels.gemm_float(task, scratch);
}

}  // namespace

int panels_per_piece(const Segment& s, int threads) {
    const int by_size = int(kPieceBytes / s.stride), by_count = s.panels / (threads * 16), most = s.panels / (threads * 4);
    return std::max(1, std::min(std::max(by_size, by_count), std::max(1, most)));
}

void linear_piece(Team& team, int tid, const Factor& x, const Segment& s, int panel, int panels, int row_begin, int row_end,
                  const LinearResult& to) {
    GemmTask t = make_task(x, s, panel, panels, row_begin, row_end);
    const int col = s.first_row + panel * kPanel;
    t.out = to.out + col;
    t.ldo = to.ld;
    t.cols = std::min(t.num_panels * kPanel, s.rows - panel * kPanel);
    t.bias = to.bias ? to.bias + col : nullptr;
    t.softcap = to.softcap;
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
            GemmTask t = make_task(x, weight.segments[part], unit * (kGatedWidth / kPanel), kGatedWidth / kPanel, row, end);
            t.out = tiles[part] - int64_t(row) * kGatedWidth;
            t.ldo = kGatedWidth;
            t.cols = t.num_panels * kPanel;
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
