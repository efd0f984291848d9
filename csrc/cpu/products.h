// Pieces of products, for the ops that cut them.
#pragma once

#include "ops.h"

namespace headrace {

constexpr int kRowBlock = 128;   // rows whose activations stay in L2 while panels pass by
constexpr int kGatedWidth = 32;  // columns of a gated piece: one quantisation group of the next product
constexpr size_t kGatedScratch = kGemmFloatScratch + 2 * kRowBlock * kGatedWidth;

// The left factor: quantised tiles, or rows of floats when `xq` is null.
struct Factor {
    const ActivationGroup* xq;
    const float* x;
    int k;
};

struct LinearResult {
    float* out;
    int64_t ld;
    const float* bias;
    float softcap;
};

// Floats, or the quantised input of the next product.
struct GatedResult {
    float* out;
    ActivationGroup* quantized;
};

// Panels of a piece: about 24 KiB, more for very large matrices, at least four pieces per thread if possible, and as
// many for each thread.
int panels_per_piece(const Segment& s, int threads, bool exact);

// Asks for what a thread will read first: the front of the weights that it begins with, and rows that others have made.
// Lines from memory or from another core's cache then arrive together, not one after the other.
void expect_weights(const Segment& s, int panel);
void expect_rows(const Factor& x, int rows);

inline int gated_units(int width) { return (width + kGatedWidth - 1) / kGatedWidth; }

void linear_piece(Team& team, int tid, const Factor& x, const Segment& s, int panel, int panels, int row_begin, int row_end,
                  const LinearResult& to);
void gated_piece(Team& team, int tid, const Factor& x, const Weight& weight, Activation activation, int unit, int row_begin,
                 int row_end, const GatedResult& to);

}  // namespace headrace
