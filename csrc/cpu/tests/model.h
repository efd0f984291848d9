// A small model over a team: a dense layer, a mixture of experts, the head, and steps of any number of rows through them.
#pragma once

#include <algorithm>

#include "../head.h"
#include "../plan.h"
#include "support.h"

namespace headrace {

struct ModelCase {
    const char* format;
    KvType kv;
    int block;
    bool exact;
};

class Model {
public:
    static constexpr int width = 64, inner = 96, heads = 4, kv_heads = 2, dim = 16, experts = 3, top_k = 2, vocab = 150;
    static constexpr int context = 192, max_reqs = 9, max_logits = 40;
    static constexpr Sizes most{130, max_reqs, 130};

    std::vector<int32_t> ids, positions, starts, lens, table, rows;
    std::vector<int64_t> slots;
    std::vector<float> hidden, logits, peaks;
    std::vector<int32_t> best;

    Model(Team& team, const ModelCase& c, unsigned seed) : max_blocks_((context + c.block - 1) / c.block), block_(c.block) {
        Random random(seed);
        ids.resize(size_t(most.tokens));
        positions.resize(ids.size());
        slots.resize(ids.size());
        starts.resize(max_reqs + 1);
        lens.resize(max_reqs);
        for (int i = 0; i < max_reqs * max_blocks_; ++i) table.push_back(i + 1);
        std::shuffle(table.begin(), table.end(), random.engine);
        rows.resize(size_t(most.logit_rows));
        norm_ = random.floats(width);
        cos_sin_ = random.floats(size_t(context) * dim);
        make_cache(c);
        const auto pack = [&](int n, int k, bool twice = false) { return pack_random(team, c.format, n, k, random, twice); };
        const auto head_weight = pack(vocab, width);
        embed(head_weight);
        const float* x = normed(residual_, nullptr, buffer(width));
        x = linear(x, width, pack((heads + 2 * kv_heads) * dim, width), c.exact);
        x = linear(attended(x, c.exact), heads * dim, pack(width, heads * dim), c.exact);
        x = gated(normed(x, residual_, buffer(width)), pack(inner, width, true), c.exact);
        x = linear(x, inner, pack(width, inner), c.exact);
        x = normed(x, residual_, buffer(width));
        const auto router = pack(experts, width);
        std::vector<std::shared_ptr<Weight>> gate_up, down;
        for (int e = 0; e < experts; ++e) gate_up.push_back(pack(inner, width, true)), down.push_back(pack(width, inner));
        x = mixed(x, router, gate_up, down, c.exact);
        x = added(x, x);
        hidden.resize(size_t(most.tokens) * width);
        normed(x, residual_, hidden.data());
        head(head_weight, c.exact);
    }

    // A random step of so many tokens and rows of logits over what earlier steps have left in the cache.
    Sizes fill(Random& random, int tokens, int logit_rows) {
        const Sizes sizes{tokens, 1 + random.below(std::min(tokens, max_reqs)), logit_rows,
                          std::max(0, logit_rows - random.below(max_logits + 1))};
        for (int r = 0; r < sizes.reqs; ++r) {
            const int left = sizes.reqs - 1 - r, rest = tokens - starts[size_t(r)];
            const int queries = left == 0 ? rest : 1 + random.below(random.below(3) == 0 ? rest - left : 1);
            const int length = queries + random.below(context - queries + 1);
            starts[size_t(r) + 1] = starts[size_t(r)] + queries;
            lens[size_t(r)] = length;
            for (int t = 0; t < queries; ++t) {
                const size_t at = size_t(starts[size_t(r)] + t);
                const int position = length - queries + t;
                positions[at] = position;
                slots[at] = int64_t(table[size_t(r * max_blocks_ + position / block_)]) * block_ + position % block_;
            }
        }
        for (int t = 0; t < tokens; ++t) ids[size_t(t)] = random.below(vocab);
        for (int r = 0; r < logit_rows; ++r) rows[size_t(r)] = random.below(tokens);
        return sizes;
    }

    void run_each(Team& team, const Sizes& sizes) {
        for (const auto& op : ops_) run_op(team, *op, sizes);
    }

    // The plan of these ops, which serve it alone from then on.
    Plan make_plan(Team& team) const {
        Plan plan(most);
        for (const auto& op : ops_) plan.append(op);
        plan.finish(team, {hidden.data(), logits.data(), best.data(), peaks.data()});
        return plan;
    }

    // All that a step of these sizes leaves behind.
    std::vector<float> results(const Sizes& sizes) const {
        std::vector<float> all(hidden.begin(), hidden.begin() + sizes.tokens * width);
        all.insert(all.end(), peaks.begin(), peaks.begin() + sizes.logit_rows);
        all.insert(all.end(), best.begin(), best.begin() + sizes.logit_rows);
        all.insert(all.end(), logits.begin(), logits.begin() + (sizes.logit_rows - sizes.best_rows) * vocab);
        return all;
    }
    bool stores_the_same(const Model& other) const {
        return key_ == other.key_ && value_ == other.value_ && scales_ == other.scales_;
    }

private:
    void make_cache(const ModelCase& c) {
        const size_t blocks = size_t(1 + max_reqs * max_blocks_), elements = size_t(kv_heads * dim * block_);
        key_.assign(blocks * elements * (c.kv == KvType::F32 ? 4 : c.kv == KvType::F16 ? 2 : 1), 0);
        value_ = key_;
        if (c.kv == KvType::I8) scales_.assign(blocks * kv_heads * 2 * size_t(block_), 0);
        cache_ = {c.kv, int(blocks), block_, kv_heads, dim, key_.data(), value_.data(),
                  c.kv == KvType::I8 ? scales_.data() : nullptr, int64_t(elements), int64_t(elements),
                  int64_t(kv_heads * 2 * block_)};
        step_ = {starts.data(), lens.data(), table.data(), max_blocks_, max_blocks_, slots.data(), max_reqs, most.tokens};
    }

    float* buffer(int columns) {
        buffers_.emplace_back(size_t(most.tokens) * size_t(columns));
        return buffers_.back().data();
    }
    template <class T> std::shared_ptr<T> add() {
        auto op = std::make_shared<T>();
        ops_.push_back(op);
        return op;
    }

    void embed(std::shared_ptr<Weight> weight) {
        auto op = add<EmbeddingOp>();
        op->ids = ids.data(), op->table = std::move(weight), op->scale = 1.5f, op->out = residual_ = buffer(width);
        op->room.tokens = most.tokens;
    }
    // With a residual, the sum takes its place.
    const float* normed(const float* x, float* residual, float* to) {
        auto op = add<NormOp>();
        op->rows = Rows::Tokens, op->width = width, op->x = x, op->residual = residual;
        op->weight = norm_.data(), op->eps = 1e-5f, op->out = to, op->sum_out = residual;
        return to;
    }
    const float* linear(const float* x, int k, std::shared_ptr<Weight> weight, bool exact) {
        auto op = add<LinearOp>();
        op->input = {Rows::Tokens, k, x, exact || !weight->quantized(), nullptr};
        op->out = buffer(weight->out_features), op->weight = std::move(weight);
        return op->out;
    }
    const float* gated(const float* x, std::shared_ptr<Weight> weight, bool exact) {
        auto op = add<GatedOp>();
        op->input = {Rows::Tokens, width, x, exact || !weight->quantized(), nullptr};
        op->weight = std::move(weight), op->activation = Activation::Silu, op->out = buffer(inner);
        return op->out;
    }
    const float* attended(const float* qkv, bool exact) {
        auto rope = add<RopeOp>();
        rope->qkv = const_cast<float*>(qkv), rope->num_heads = heads, rope->rotary_dim = dim, rope->max_position = context;
        rope->positions = positions.data(), rope->cos_sin = cos_sin_.data(), rope->step = step_, rope->cache = cache_;
        rope->q_out = buffer(heads * dim);
        auto op = add<AttentionOp>();
        op->q = rope->q_out, op->num_heads = heads, op->window = 0, op->chunk = 0, op->scale = 0.25f, op->softcap = 0;
        op->exact = exact, op->step = step_, op->cache = cache_, op->out = buffer(heads * dim);
        return op->out;
    }
    const float* mixed(const float* x, const std::shared_ptr<Weight>& router, std::vector<std::shared_ptr<Weight>> gate_up,
                       std::vector<std::shared_ptr<Weight>> down, bool exact) {
        auto op = add<MoeOp>();
        op->exact = exact || !gate_up[0]->quantized();
        op->router.input = {Rows::Tokens, width, x, op->exact, nullptr};
        op->router.weight = router, op->gate_up = std::move(gate_up), op->down = std::move(down), op->top_k = top_k;
        op->activation = Activation::GeluTanh, op->renormalize = true, op->out = buffer(width);
        return op->out;
    }
    const float* added(const float* x, const float* y) {
        auto op = add<AddOp>();
        op->rows = Rows::Tokens, op->width = width, op->x = x, op->y = y, op->out = buffer(width);
        return op->out;
    }
    void head(const std::shared_ptr<Weight>& weight, bool exact) {
        auto gather = add<GatherOp>();
        gather->width = width, gather->x = hidden.data(), gather->index = rows.data();
        gather->out = buffer(width);
        best.resize(size_t(most.logit_rows));
        peaks.resize(best.size());
        logits.resize(size_t(max_logits) * vocab);
        auto op = add<HeadOp>();
        op->input = {Rows::Logits, width, gather->out, exact || !weight->quantized(), nullptr};
        op->weight = weight, op->softcap = 30, op->best = best.data(), op->peaks = peaks.data();
        op->logits = logits.data(), op->ld = vocab, op->max_logits = max_logits;
    }

    const int max_blocks_, block_;
    std::vector<uint8_t> key_, value_;
    std::vector<float> scales_, norm_, cos_sin_;
    CacheView cache_{};
    StepView step_{};
    float* residual_ = nullptr;
    std::vector<std::vector<float>> buffers_;
    std::vector<std::shared_ptr<Op>> ops_;
};

}  // namespace headrace
