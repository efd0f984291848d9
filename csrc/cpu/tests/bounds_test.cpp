// What would reach past a buffer is an error before anything has run, op by op and in a plan.

#include "model.h"
#include "tests.h"

namespace headrace {

namespace {

const ModelCase kCase{"Q4_1", KvType::F16, 16, false};

template <class F> void expect_out_of_range(const std::string& what, F&& run) { expect_error<std::out_of_range>(what, run); }

// A model whose inputs are spoilt one at a time.
struct Spoilt {
    Team team{2, find_kernels("")};
    Model eager{team, kCase, 3}, planned{team, kCase, 3};
    Plan plan = planned.make_plan(team);
    Sizes sizes;
    std::vector<float> good;

    Spoilt() {
        for (Model* model : {&eager, &planned}) {
            Random random(9);
            sizes = model->fill(random, 41, 13);
        }
        eager.run_each(team, sizes);
        plan.replay(team, sizes);
        good = planned.results(sizes);
        expect(eager.results(sizes) == good, "a plan before it is spoilt");
    }

    void refuses_sizes(const Sizes& bad, const std::string& what) {
        expect_out_of_range(what, [&] { plan.replay(team, bad); });
        expect(planned.results(sizes) == good, what + " has run");
    }

    template <class T> void refuses(std::vector<T> Model::*place, size_t at, T bad, const std::string& what) {
        for (Model* model : {&eager, &planned}) {
            T& value = (model->*place)[at];
            const T before = value;
            value = bad;
            expect_out_of_range(what, [&] {
                if (model == &eager) eager.run_each(team, sizes);
                else plan.replay(team, sizes);
            });
            value = before;
        }
        expect(planned.results(sizes) == good, what + " has run");
    }
};

}  // namespace

void test_bounds() {
    Spoilt s;
    const size_t last = size_t(s.sizes.reqs) - 1;
    s.refuses(&Model::ids, 40, Model::vocab, "a token id past the table");
    s.refuses(&Model::ids, 0, -1, "a negative token id");
    s.refuses(&Model::slots, 40, int64_t(1) << 40, "a slot past the cache");
    s.refuses(&Model::slots, 0, int64_t(-2), "a negative slot that is not the padding's");
    s.refuses(&Model::positions, 40, Model::context, "a position past the rotary table");
    s.refuses(&Model::positions, 0, -1, "a negative position");
    s.refuses(&Model::table, last * Model::context / 16, 1 << 20, "a block past the cache");
    s.refuses(&Model::table, 0, -5, "a negative block");
    s.refuses(&Model::lens, 0, Model::context + 1, "a length past the block table");
    s.refuses(&Model::lens, last, 0, "a length shorter than the new tokens");
    s.refuses(&Model::lens, last, INT_MIN, "the smallest length");
    s.refuses(&Model::lens, last, INT_MAX, "the largest length");
    s.refuses(&Model::starts, 0, 1, "a step that does not begin at its first token");
    s.refuses(&Model::starts, last + 1, 130, "queries past the step");
    s.refuses(&Model::rows, 12, 41, "a row past the step");
    s.refuses(&Model::rows, 0, -1, "a negative row");
    s.refuses_sizes({131, 5, 1, 1}, "more tokens than the plan has room for");
    s.refuses_sizes({41, 10, 1, 1}, "more requests than the plan has room for");
    s.refuses_sizes({41, 5, 131, 131}, "more rows of logits than the plan has room for");
    s.refuses_sizes({-1, 0, 0, 0}, "a negative number of tokens");
    s.refuses_sizes({0, -1, 0, 0}, "a negative number of requests");
    s.refuses_sizes({0, 0, -1, 0}, "a negative number of rows of logits");
    s.refuses_sizes({41, s.sizes.reqs, 13, 14}, "more best rows than rows");
    s.refuses_sizes({41, s.sizes.reqs, 13, -1}, "a negative number of best rows");
    s.refuses_sizes({41, s.sizes.reqs, Model::max_logits + 1, 0}, "more logits than have room");
    s.plan.replay(s.team, {0, 0, 0, 0});
    s.plan.replay(s.team, s.sizes);
    expect(s.planned.results(s.sizes) == s.good, "a plan after it was spoilt");
}

// Ops that share an input but not its bounds are each checked; row counts are held against what buffers have room for.
void test_checks() {
    Team team(2, find_kernels(""));
    Random random(4);
    constexpr int width = 32, tokens = 6;
    std::vector<int32_t> ids(tokens, 30), best(tokens);
    std::vector<float> first(tokens * width), second(tokens * width), peaks(tokens);
    const auto large = pack_random(team, "Q8_0", 50, width, random), small = pack_random(team, "Q8_0", 20, width, random);
    const auto embed = [&](const std::shared_ptr<Weight>& table, std::vector<float>& out) {
        auto op = std::make_shared<EmbeddingOp>();
        op->ids = ids.data(), op->table = table, op->scale = 1, op->out = out.data(), op->room.tokens = tokens;
        return op;
    };
    Plan tables({tokens, 0, 0});
    tables.append(embed(large, first));
    tables.append(embed(small, second));
    tables.finish(team, {first.data(), second.data()});
    expect_out_of_range("an id past the smaller of two tables", [&] { tables.replay(team, {tokens, 0, 0}); });
    ids.assign(tokens, 19);
    tables.replay(team, {tokens, 0, 0});

    const auto op = embed(large, first);
    expect_out_of_range("more rows than a buffer", [&] { run_op(team, *op, {tokens + 1, 0, 0}); });
    expect_out_of_range("a negative number of rows", [&] { run_op(team, *op, {-1, 0, 0}); });
    Plan larger({tokens + 1, 0, 0});
    larger.append(op);
    expect_out_of_range("a plan larger than its buffers", [&] { larger.finish(team, {}); });

    auto head = std::make_shared<HeadOp>();
    head->input = {Rows::Logits, width, first.data(), false, nullptr};
    head->weight = large, head->best = best.data(), head->peaks = peaks.data();
    head->logits = nullptr, head->ld = 50, head->max_logits = 0;
    Plan heads({tokens, 0, tokens});
    heads.append(head);
    heads.finish(team, {best.data()});
    heads.replay(team, {tokens, 0, tokens, tokens});
    expect_out_of_range("logits without room", [&] { heads.replay(team, {tokens, 0, tokens, tokens - 1}); });
    expect_out_of_range("logits without room, op by op", [&] { run_op(team, *head, {tokens, 0, tokens, 0}); });

    // The window hides a bad block from the first of two ops.
    std::vector<int32_t> starts{0, 1}, lens{40}, table{99, 1, 2};
    std::vector<int64_t> slots{39};
    std::vector<float> kv(3 * 16 * 16), q(16), out(16);
    const auto attend = [&](int window) {
        auto made = std::make_shared<AttentionOp>();
        made->q = q.data(), made->num_heads = 1, made->window = window, made->chunk = 0;
        made->exact = true, made->scale = 1, made->softcap = 0;
        made->step = {starts.data(), lens.data(), table.data(), 3, 3, slots.data(), 1, 1};
        made->cache = {KvType::F32, 3, 16, 1, 16, kv.data(), kv.data(), nullptr, 256, 256, 0};
        made->out = out.data();
        return made;
    };
    Plan windows({1, 1, 0});
    windows.append(attend(16));
    windows.finish(team, {out.data()});
    windows.replay(team, {1, 1, 0});
    Plan both({1, 1, 0});
    both.append(attend(16));
    both.append(attend(0));
    both.finish(team, {out.data()});
    expect_out_of_range("a block that only the second op reads", [&] { both.replay(team, {1, 1, 0}); });
}

}  // namespace headrace
