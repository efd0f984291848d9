// Stand-alone test of kernels, team and plan, meant to run under sanitizers: every buffer has exactly the size it needs.
//
// Compares each instruction set of this machine and each team size with the generic unit on one thread, bit by bit.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../draw.h"
#include "../features.h"
#include "../ops.h"
#include "../plan.h"

using namespace headrace;

namespace {

int failures = 0;

void expect(bool fine, const std::string& what) {
    if (fine) return;
    ++failures;
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

struct Random {
    std::mt19937 engine;
    explicit Random(unsigned seed) : engine(seed) {}
    int below(int n) { return int(engine() % unsigned(n)); }
    std::vector<float> floats(size_t n, float scale = 1.0f) {
        std::normal_distribution<float> normal;
        std::vector<float> values(n);
        for (auto& v : values) v = normal(engine) * scale;
        return values;
    }
    std::vector<uint8_t> bytes(size_t n) {
        std::vector<uint8_t> values(n);
        for (auto& v : values) v = uint8_t(engine());
        return values;
    }
};

// A matrix in a file's format; scales are small float16 numbers.
struct Source {
    std::vector<uint8_t> data;
    SourceTensor tensor;
    Source(const std::string& name, int rows, int k, Random& random) {
        const FileFormat* format = find_file_format(name);
        const size_t row_bytes = format->row_bytes(k), block = size_t(format->bytes);
        data = random.bytes(row_bytes * size_t(rows));
        if (name == "F32") {
            const auto values = random.floats(size_t(rows) * size_t(k));
            std::memcpy(data.data(), values.data(), data.size());
        }
        // Any exponent but the largest ones: of float16 and bfloat16 alike, and of the float16 scales of blocks.
        const size_t first = name == "Q2_K" ? 80 : name == "Q3_K" ? 108 : name == "Q6_K" ? 208 : 0;
        const size_t halves = format->packed == Format::I8 || name == "Q4_0" || first > 80 ? 1 : 2;
        const int low = format->read ? 0x24 : 0x38;
        for (size_t at = first; name != "F32" && at < data.size(); at += block)
            for (size_t i = 1; i < 2 * (format->read ? halves : 1); i += 2) data[at + i] = uint8_t((data[at + i] & 0x83) | low);
        tensor = {format, rows, data.data(), row_bytes};
    }
};

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
            std::vector<Source> sources;
            const std::string fitting = k % find_file_format(format)->values ? "Q8_0" : format;
            for (int i = 0; i < (twice ? 2 : 1); ++i) sources.emplace_back(fitting, n, k, random);
            std::vector<SourceTensor> parts;
            for (const auto& source : sources) parts.push_back(source.tensor);
            return pack_weight(team, parts, k, "", twice);
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
        const StepView step{starts.data(), lens.data(), table.data(), max_blocks, max_blocks, slots.data(), kSizes.reqs};
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
        attention->scale = 0.25f, attention->softcap = 0, attention->step = step, attention->cache = cache;
        attention->out = attended.data();
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

void test_bounds() {
    Team team(2, find_kernels(""));
    Layer layer(team, "Q4_1", KvType::F16, 16, false, 3);
    const auto refuses = [&](auto& place, auto bad, const char* what) {
        const auto before = place;
        place = bad;
        bool refused = false;
        try {
            layer.run_eager(team);
        } catch (const std::out_of_range&) {
            refused = true;
        }
        expect(refused, what);
        place = before;
    };
    refuses(layer.ids[4], 50, "a token id past the table");
    refuses(layer.slots[2], int64_t(1) << 40, "a slot past the cache");
    refuses(layer.table[3 * Layer::max_blocks], -5, "a negative block");
    refuses(layer.lens[1], 100000, "a length past the block table");
    refuses(layer.positions[0], -1, "a negative position");
    refuses(layer.rows[0], 41, "a row past the step");
    layer.run_eager(team);
}

// Holds a thread up for a while, as a busy system would: mostly not, sometimes for longer than a whole run.
void hold_up(Random& random) {
    if (random.below(8) > 0) return;
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(random.below(random.below(10) == 0 ? 500 : 20));
    while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
}

// Each row of each number of rows, so each tile and each place in it, has the bits of the row alone on the generic unit.
// Outputs end inside a panel; the last rows of x are taken, so that reading past one is seen.
void test_tiles() {
    constexpr int most = 35, outputs = 83, width = 256;
    Team plain(1, find_kernels("generic"));
    for (const char* format : {"Q4_1", "Q8_0", "Q4_K", "Q5_1", "Q6_K", "BF16"})
        for (bool exact : {false, true}) {
            Random random(13);
            const Source source(format, outputs, width, random);
            const auto x = random.floats(most * width);
            const auto multiply = [&](Team& team, int first, int rows) {
                std::vector<float> out(size_t(rows * outputs));
                LinearOp op;
                op.weight = pack_weight(team, {source.tensor}, width, "", false);
                op.input = {Rows::Tokens, width, x.data() + first * width, exact || !op.weight->quantized(), nullptr};
                op.out = out.data();
                run_op(team, op, {rows, 1, 0});
                return out;
            };
            std::vector<float> want;
            for (int row = 0; row < most; ++row)
                for (float value : multiply(plain, row, 1)) want.push_back(value);
            for (const Kernels* kernels : available_kernels()) {
                Team team(2, *kernels);
                for (int rows = 1; rows <= most; ++rows) {
                    const std::vector<float> alone(want.end() - rows * outputs, want.end());
                    expect(multiply(team, most - rows, rows) == alone, std::string(format) + " in tiles of " +
                                                                           kernels->name + ", " + std::to_string(rows) + " rows");
                }
            }
        }
}

// Every piece runs once, after all pieces of the calls before, however many there are, however they are shared and whoever
// comes late; a run that has returned is over for everybody.
void test_team() {
    constexpr int calls = 5, most = 37;
    for (int threads : {1, 2, 3, 8}) {
        Team team(threads, find_kernels("generic"));
        for (int round = 0; round < 300; ++round) {
            std::vector<int> seen(calls * most);
            int sums[calls + 1] = {};
            const auto pieces_of = [&](int call) { return (round + 11 * call) % most; };
            team.run([&](int tid) {
                Random random(unsigned(round * threads + tid));
                hold_up(random);
                for (int call = 0; call < calls; ++call) {
                    team.for_each(tid, pieces_of(call), [&](int64_t i) {
                        hold_up(random);
                        seen[size_t(call * most + i)] += 1 + sums[call];
                    });
                    hold_up(random);
                    team.for_each(tid, 1, [&](int64_t) {
                        for (int i = 0; i < pieces_of(call); ++i) sums[call + 1] += seen[size_t(call * most + i)];
                        sums[call + 1] %= 1000;
                    });
                }
                hold_up(random);
            });
            int sum = 0;
            for (int call = 0; call < calls; ++call) sum = pieces_of(call) * (1 + sum) % 1000;
            expect(sums[calls] == sum, "each piece once, and in order");
        }
    }
}

void test_draws() {
    Random random(5);
    for (int n : {1, 31, 32, 33, 1000}) {
        for (uint64_t position = 0; position < 50; ++position) {
            const auto x = random.floats(size_t(n), float(position % 5));
            const int want = draw_token(find_kernels("generic"), x.data(), n, 11, position);
            expect(want >= 0 && want < n, "a token of the row");
            for (const Kernels* kernels : available_kernels())
                expect(draw_token(*kernels, x.data(), n, 11, position) == want, std::string("a draw on ") + kernels->name);
        }
    }
}

}  // namespace

int main() {
    test_draws();
    test_team();
    test_bounds();
    test_tiles();
    test_layers();
    std::printf(failures ? "%d failures\n" : "all fine\n", failures);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
