#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "head.h"
#include "products.h"

namespace headrace {

namespace {

// Columns of a tile: 128 rows of them stay in the first two levels of cache, and its rows lie beside each other. Rows of a
// whole matrix of logits would lie a multiple of 4 KiB apart and fight for the same few lines.
constexpr int kTilePanels = 4, kTileCols = kTilePanels * kPanel;

bool beats(const Best& a, const Best& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

}  // namespace

void HeadOp::check(const Sizes& sizes) const {
    if (sizes.best_rows < 0 || sizes.best_rows > sizes.logit_rows || sizes.logit_rows - sizes.best_rows > max_logits)
        throw std::out_of_range("logits of " + std::to_string(sizes.logit_rows - sizes.best_rows) + " rows are asked for, " +
                                std::to_string(max_logits) + " have room");
}

void HeadOp::reserve(Team& team, const Sizes& most) const {
    input.reserve(team, most);
    team.reserve_scratch(kGemmFloatScratch + size_t(kRowBlock) * kTileCols);
    team.reserve_shared(Shared::Best, size_t(team.size()) * size_t(most.logit_rows) * sizeof(Best));
}

void HeadOp::run(Team& team, int tid, const Sizes& sizes) const {
    const int rows = sizes.logit_rows;
    const ActivationGroup* xq = input.prepare(team, tid, rows);
    Best* found = team.shared<Best>(Shared::Best);
    team.for_each(tid, 1, [&](int64_t) {
        std::fill_n(found, int64_t(team.size()) * rows, Best{-INFINITY, std::numeric_limits<int32_t>::max()});
    });
    const int blocks = (rows + kRowBlock - 1) / kRowBlock;
    for (const Segment& s : weight->segments) {
        const int step = panels_per_piece(s, team.size(), input.exact);
        const int pieces = (s.panels + step - 1) / step;
        team.for_each(tid, int64_t(pieces) * blocks, [&](int64_t i) {
            const int block = int(i / pieces) * kRowBlock, panel = int(i % pieces) * step;
            run_piece(team, tid, sizes, xq, s, panel, std::min(step, s.panels - panel), block,
                      std::min(rows, block + kRowBlock));
        });
    }
    team.for_each(tid, 1, [&](int64_t) {
        for (int r = 0; r < rows; ++r) {
            Best top = found[r];
            for (int t = 1; t < team.size(); ++t)
                if (const Best& other = found[int64_t(t) * rows + r]; beats(other, top)) top = other;
            best[r] = top.id;
            peaks[r] = top.value;
        }
    });
}

void HeadOp::run_piece(Team& team, int tid, const Sizes& sizes, const ActivationGroup* xq, const Segment& s, int panel,
                       int panels, int row_begin, int row_end) const {
    const Factor x{xq, input.x, input.width};
    Best* found = team.shared<Best>(Shared::Best) + int64_t(tid) * sizes.logit_rows;
    float* tile = team.scratch(tid) + kGemmFloatScratch;
    for (int end = panel + panels; panel < end; panel += kTilePanels) {
        const int count = std::min(kTilePanels, end - panel), col = s.first_row + panel * kPanel;
        const int cols = std::min(count * kPanel, s.rows - panel * kPanel);
        // The product writes rows and columns where they stand in the whole matrix; here that is inside the tile.
        const LinearResult to{tile - int64_t(row_begin) * kTileCols - col, kTileCols, nullptr, softcap};
        linear_piece(team, tid, x, s, panel, count, row_begin, row_end, to);
        team.kernels().find_best(tile, kTileCols, row_end - row_begin, cols, col, found + row_begin);
        for (int r = std::max(row_begin, sizes.best_rows); r < row_end; ++r)
            std::memcpy(logits + int64_t(r - sizes.best_rows) * ld + col, tile + int64_t(r - row_begin) * kTileCols,
                        size_t(cols) * sizeof(float));
    }
}

}  // namespace headrace
