// A layer's worth of ops, op by op and as a plan: every unit and team size has the bits of the generic unit on one thread.

#include "../plan.h"
#include "support.h"
#include "tests.h"

namespace headrace {

namespace {

const Sizes kSizes{41, 7, 5};

// A layer's worth of ops over one team, with every input drawn from one seed.
struct Layer {
    static constexpr int width = 256, inner = 160, heads = 6, kv_heads = 2, dim = 16, max_blocks = 12;
    int block_size;
    std::vector<int32_t> ids, positions, starts, lens, table, rows;
    std::vector<int64_t> slots;
    std::vector<float> x, residual, normed, qkv, q, attended, hidden, gated, out, picked, logits, norm, cos_sin, scales;
    std::vector<uint8_t> key, value;
    std::vector<int32_t> best;
    std::vector<std::shared_ptr<Op>> ops;

    Layer(Team& team, const std::string& format, KvType kv, int block, bool exact, unsigned seed) : block_size(block) {
        Random random(seed);
        make_step(random);
        const auto pack = [&](int n, int k, bool twice = false) {
            return pack_random(team, format, n, k, random, twice);
        };
        const size_t tokens = size_t(kSizes.tokens);
        const auto table_weight = pack(50, width);
        const size_t element = kv == KvType::F32 ? 4 : kv == KvType::F16 ? 2 : 1;
        const size_t blocks = size_t(1 + kSizes.reqs * max_blocks), block_elements = size_t(kv_heads * dim * block_size);
        key.assign(blocks * block_elements * element, 0);
        value = key;
        scales.assign(kv == KvType::I8 ? blocks * kv_heads * 2 * size_t(block_size) : 0, 0);
        norm = random.floats(width);
        cos_sin = random.floats(size_t(max_blocks * block_size) * dim);
        x.resize(tokens * width);
        for (auto* buffer : {&residual, &normed, &hidden, &out}) buffer->resize(tokens * width);
        qkv.resize(tokens * (heads + 2 * kv_heads) * dim);
        for (auto* buffer : {&q, &attended}) buffer->resize(tokens * heads * dim);
        gated.resize(tokens * inner);
        picked.resize(size_t(kSizes.logit_rows) * width);
        logits.resize(size_t(kSizes.logit_rows) * 50);
        best.resize(size_t(kSizes.logit_rows));

        const CacheView cache{kv, int(blocks), block_size, kv_heads, dim, key.data(), value.data(),
                              scales.empty() ? nullptr : scales.data(), int64_t(block_elements), int64_t(block_elements),
                              int64_t(kv_heads * 2 * block_size)};
        const StepView step{starts.data(), lens.data(), table.data(), max_blocks, max_blocks, slots.data(), kSizes.reqs, kSizes.tokens};
        auto embedding = add<EmbeddingOp>();
        embedding->ids = ids.data(), embedding->table = table_weight, embedding->scale = 1.5f, embedding->out = x.data();
        add_norm(x.data(), nullptr, normed.data(), nullptr);
        add_linear(normed.data(), width, pack((heads + 2 * kv_heads) * dim, width), exact, qkv.data(), Rows::Tokens);
        auto rope = add<RopeOp>();
        rope->qkv = qkv.data(), rope->num_heads = heads, rope->rotary_dim = dim, rope->max_position = max_blocks * block_size;
        rope->positions = positions.data(), rope->cos_sin = cos_sin.data(), rope->step = step, rope->cache = cache;
        rope->q_out = q.data();
        auto attention = add<AttentionOp>();
        attention->q = q.data(), attention->num_heads = heads, attention->window = 0, attention->chunk = 0;
        attention->exact = exact, attention->scale = 0.25f, attention->softcap = 0;
        attention->step = step, attention->cache = cache, attention->out = attended.data();
        add_linear(attended.data(), heads * dim, pack(width, heads * dim), exact, hidden.data(), Rows::Tokens);
        add_norm(hidden.data(), x.data(), normed.data(), residual.data());
        auto gate = add<GatedOp>();
        const auto gate_up = pack(inner, width, true);
        gate->input = {Rows::Tokens, width, normed.data(), exact || !gate_up->quantized(), nullptr};
        gate->weight = gate_up, gate->activation = Activation::Silu, gate->out = gated.data();
        add_linear(gated.data(), inner, pack(width, inner), exact, out.data(), Rows::Tokens);
        auto gather = add<GatherOp>();
        gather->width = width, gather->x = out.data(), gather->index = rows.data(), gather->out = picked.data();
        add_linear(picked.data(), width, table_weight, exact, logits.data(), Rows::Logits);
        auto arg_max = add<ArgMaxOp>();
        arg_max->width = 50, arg_max->x = logits.data(), arg_max->out = best.data();
    }

    void make_step(Random& random) {
        starts = {0};
        for (int r = 0; r < kSizes.reqs; ++r) {
            const int rest = kSizes.tokens - starts.back(), left = kSizes.reqs - 1 - r;
            starts.push_back(starts.back() + (left == 0 ? rest : 1 + random.below(rest - left)));
        }
        for (int r = 0; r < kSizes.reqs; ++r) {
            const int queries = starts[size_t(r) + 1] - starts[size_t(r)];
            lens.push_back(queries + random.below(max_blocks * block_size - queries + 1));
            for (int b = 0; b < max_blocks; ++b) table.push_back(1 + b * kSizes.reqs + r);
            for (int t = 0; t < queries; ++t) {
                const int position = lens.back() - queries + t;
                positions.push_back(position);
                slots.push_back(int64_t(table[size_t(r * max_blocks + position / block_size)]) * block_size + position % block_size);
            }
        }
        for (int t = 0; t < kSizes.tokens; ++t) ids.push_back(random.below(50));
        for (int r = 0; r < kSizes.logit_rows; ++r) rows.push_back(random.below(kSizes.tokens));
    }

    template <class T> std::shared_ptr<T> add() {
        auto op = std::make_shared<T>();
        ops.push_back(op);
        return op;
    }
    void add_norm(const float* in, const float* rest, float* to, float* sum) {
        auto op = add<NormOp>();
        op->rows = Rows::Tokens, op->width = width, op->x = in, op->residual = rest, op->weight = norm.data(), op->eps = 1e-5f;
        op->out = to, op->sum_out = sum;
    }
    void add_linear(const float* in, int k, std::shared_ptr<Weight> weight, bool exact, float* to, Rows kind) {
        auto op = add<LinearOp>();
        op->input = {kind, k, in, exact || !weight->quantized(), nullptr};
        op->weight = std::move(weight), op->out = to;
    }

    void run_eager(Team& team) {
        for (const auto& op : ops) run_op(team, *op, kSizes);
    }
    void run_plan(Team& team, int times) {
        Plan plan(kSizes);
        for (const auto& op : ops) plan.append(op);
        plan.finish(team, {logits.data(), best.data(), out.data()});
        for (int i = 0; i < times; ++i) plan.replay(team, kSizes);
    }
    bool equals(const Layer& other) const { return out == other.out && logits == other.logits && best == other.best && key == other.key; }
};

}  // namespace

void test_layers() {
    struct Case {
        const char* format;
        KvType kv;
        int block;
        bool exact;
    };
    for (const Case& c : {Case{"Q4_1", KvType::F16, 32, false}, Case{"Q8_0", KvType::I8, 16, false},
                          Case{"Q4_0", KvType::F32, 8, true}, Case{"F32", KvType::F32, 16, true},
                          Case{"BF16", KvType::F16, 64, true}, Case{"F16", KvType::I8, 20, true},
                          Case{"Q5_0", KvType::F16, 32, true}, Case{"Q5_1", KvType::F16, 32, false},
                          Case{"Q2_K", KvType::F16, 32, false}, Case{"Q3_K", KvType::F16, 32, true},
                          Case{"Q4_K", KvType::F16, 32, false}, Case{"Q5_K", KvType::F16, 32, true},
                          Case{"Q6_K", KvType::F16, 32, false}}) {
        Team plain(1, find_kernels("generic"));
        Layer want(plain, c.format, c.kv, c.block, c.exact, 7);
        want.run_eager(plain);
        for (const Kernels* kernels : available_kernels())
            for (int threads : {1, 2, 5}) {
                const std::string name = std::string(c.format) + " on " + kernels->name + " with " + std::to_string(threads);
                Team team(threads, *kernels);
                Layer eager(team, c.format, c.kv, c.block, c.exact, 7), planned(team, c.format, c.kv, c.block, c.exact, 7);
                eager.run_eager(team);
                expect(eager.equals(want), name + ": eager");
                planned.run_plan(team, 2);
                expect(planned.equals(want), name + ": plan");
            }
    }
}

}  // namespace headrace
