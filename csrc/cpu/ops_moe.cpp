// Mixture of experts: route, group rows by expert, two grouped products, combine in top-k order.

#include <algorithm>
#include <cstring>

#include "products.h"

namespace headrace {

namespace {

// Parts of the shared index and float buffers of one run. A slot is one (token, choice), ordered by expert, then token.
struct MoeBuffers {
    int32_t *experts, *slot_of, *token_of, *first_slot, *first_block;
    float *logits, *shares, *rows, *hidden, *results;

    static size_t ints(size_t tokens, size_t k, size_t experts) { return 3 * tokens * k + 2 * (experts + 1); }
    static size_t floats(size_t tokens, size_t k, size_t experts, size_t width, size_t inner) {
        return tokens * experts + tokens * k * (1 + 2 * width + inner);
    }
    MoeBuffers(Team& team, size_t tokens, size_t k, size_t num_experts, size_t width, size_t inner) {
        experts = team.shared<int32_t>(Shared::MoeIndex);
        slot_of = experts + tokens * k;
        token_of = slot_of + tokens * k;
        first_slot = token_of + tokens * k;
        first_block = first_slot + num_experts + 1;
        logits = team.shared<float>(Shared::Moe);
        shares = logits + tokens * num_experts;
        rows = shares + tokens * k;
        results = rows + tokens * k * width;
        hidden = results + tokens * k * width;
        (void)inner;
    }
};

// Softmax over all experts, the k greatest (the lower id of equals), their shares scaled to one when asked.
void route_row(const Kernels& kernels, float* logits, int num_experts, int k, bool renormalize, int32_t* experts,
               float* shares) {
    kernels.softmax(logits, num_experts, logits);
    float total = 0;
    for (int j = 0; j < k; ++j) {
        int best = -1;
        for (int e = 0; e < num_experts; ++e)
            if (std::find(experts, experts + j, e) == experts + j && (best < 0 || logits[e] > logits[best])) best = e;
        experts[j] = best;
        shares[j] = logits[best];
        total += shares[j];
    }
    if (renormalize)
        for (int j = 0; j < k; ++j) shares[j] /= total;
}

// Blocks of up to kRowBlock rows of one expert, over all experts: no more than this.
int most_blocks(int slots, int experts) { return slots / kRowBlock + std::min(slots, experts); }

// Calls piece(expert, part, row_begin, row_end) for every part of every block of every expert's rows.
template <class F>
void for_expert_rows(Team& team, int tid, int experts, int slots, const int32_t* first_slot, const int32_t* first_block, int parts,
                     F&& piece) {
    // How many blocks there are is only known to pieces: the last ones may find none.
    team.for_each(tid, int64_t(most_blocks(slots, experts)) * parts, [&](int64_t i) {
        const int block = int(i / parts);
        if (block >= first_block[experts]) return;
        const int e = int(std::upper_bound(first_block, first_block + experts + 1, block) - first_block) - 1;
        const int begin = first_slot[e] + (block - first_block[e]) * kRowBlock;
        piece(e, int(i % parts), begin, std::min(first_slot[e + 1], begin + kRowBlock));
    });
}

// Orders the slots by expert, then token.
void group_slots(const MoeBuffers& b, int slots, int experts, int top_k) {
    std::fill(b.first_slot, b.first_slot + experts + 1, 0);
    for (int i = 0; i < slots; ++i) ++b.first_slot[b.experts[i] + 1];
    for (int e = 0; e < experts; ++e) b.first_slot[e + 1] += b.first_slot[e];
    for (int i = 0; i < slots; ++i) {
        const int slot = b.first_slot[b.experts[i]]++;
        b.slot_of[i] = slot;
        b.token_of[slot] = i / top_k;
    }
    for (int e = experts; e > 0; --e) b.first_slot[e] = b.first_slot[e - 1];
    b.first_slot[0] = 0;
    b.first_block[0] = 0;
    for (int e = 0; e < experts; ++e)
        b.first_block[e + 1] = b.first_block[e] + (b.first_slot[e + 1] - b.first_slot[e] + kRowBlock - 1) / kRowBlock;
}

}  // namespace

void MoeOp::reserve(Team& team, const Sizes& most) const {
    router.reserve(team, most);
    const size_t slots = size_t(most.tokens) * size_t(top_k), inner = size_t(gate_up[0]->segments[0].rows);
    team.reserve_scratch(kGatedScratch);
    team.reserve_shared(Shared::MoeIndex, MoeBuffers::ints(size_t(most.tokens), size_t(top_k), gate_up.size()) * 4);
    team.reserve_shared(Shared::Moe, MoeBuffers::floats(size_t(most.tokens), size_t(top_k), gate_up.size(),
                                                        size_t(router.input.width), inner) * 4);
    if (!exact) {
        team.reserve_shared(Shared::MoeActivations, activation_bytes(int(slots), router.input.width));
        team.reserve_shared(Shared::MoeHidden, activation_bytes(int(slots), int(inner)));
    }
}

void MoeOp::run(Team& team, int tid, const Sizes& sizes) const {
    const int tokens = sizes.tokens, width = router.input.width, experts = int(gate_up.size());
    const int inner = gate_up[0]->segments[0].rows, slots = tokens * top_k;
    const MoeBuffers b(team, size_t(tokens), size_t(top_k), size_t(experts), size_t(width), size_t(inner));
    LinearOp route = router;
    route.out = b.logits;
    route.run(team, tid, sizes);
    team.for_each(tid, tokens, [&](int64_t t) {
        route_row(team.kernels(), b.logits + t * experts, experts, top_k, renormalize, b.experts + t * top_k,
                  b.shares + t * top_k);
    });
    team.for_each(tid, 1, [&](int64_t) { group_slots(b, slots, experts, top_k); });
    auto* xq = exact ? nullptr : team.shared<ActivationGroup>(Shared::MoeActivations);
    auto* hidden = exact ? nullptr : team.shared<ActivationGroup>(Shared::MoeHidden);
    team.for_each(tid, slots, [&](int64_t slot) {
        const float* row = router.input.x + int64_t(b.token_of[slot]) * width;
        if (exact) std::memcpy(b.rows + slot * width, row, size_t(width) * sizeof(float));
        else team.kernels().quantize(row, width, int(slot), int(slot) + 1, 0, width / kGroup, width / kGroup, xq);
    });
    const int units = gated_units(inner);
    for_expert_rows(team, tid, experts, slots, b.first_slot, b.first_block, units, [&](int e, int unit, int begin, int end) {
        gated_piece(team, tid, {xq, b.rows, width}, *gate_up[size_t(e)], activation, unit, begin, end, {b.hidden, hidden});
    });
    const int step = panels_per_piece(down[0]->segments[0], team.size(), exact);
    const int pieces = (down[0]->segments[0].panels + step - 1) / step;
    for_expert_rows(team, tid, experts, slots, b.first_slot, b.first_block, pieces, [&](int e, int piece, int begin, int end) {
        linear_piece(team, tid, {hidden, b.hidden, inner}, down[size_t(e)]->segments[0], piece * step, step, begin, end,
                     {b.results, width, nullptr, 0});
    });
    team.for_each(tid, tokens, [&](int64_t t) {
        float* row = out + t * width;
        std::fill(row, row + width, 0.0f);
        for (int j = 0; j < top_k; ++j)
            team.kernels().scale_add(b.shares[t * top_k + j], b.results + int64_t(b.slot_of[t * top_k + j]) * width, row, width);
    });
}

}  // namespace headrace
