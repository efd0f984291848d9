// Plans against their ops one by one: steps of every number of rows, in any order, on every unit and team.

#include <numeric>

#include "model.h"
#include "tests.h"

namespace headrace {

namespace {

// Numbers of tokens in the order of the steps: all of them, or those around the borders of tiles, pieces and blocks.
std::vector<int> make_counts(bool all, Random& random) {
    std::vector<int> counts = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 95, 113, 127, 128, 129, 130};
    if (all) {
        counts.resize(size_t(Model::most.tokens));
        std::iota(counts.begin(), counts.end(), 1);
    }
    std::shuffle(counts.begin(), counts.end(), random.engine);
    return counts;
}

// The results of one step after the other.
template <class F> std::vector<std::vector<float>> run_steps(Model& model, bool all, F&& run) {
    Random random(17);
    std::vector<std::vector<float>> results;
    for (const int tokens : make_counts(all, random)) {
        // As many rows of logits as tokens are missing: all numbers too, and never the same.
        const Sizes sizes = model.fill(random, tokens, Model::most.logit_rows + 1 - tokens);
        run(sizes);
        results.push_back(model.results(sizes));
    }
    return results;
}

void compare(const ModelCase& c, bool all, std::initializer_list<int> threads) {
    Team one(1, find_kernels("generic"));
    Model want(one, c, 5);
    const auto expected = run_steps(want, all, [&](const Sizes& sizes) { want.run_each(one, sizes); });
    for_teams(threads, [&](Team& team, const std::string& name) {
        Model planned(team, c, 5);
        const Plan plan = planned.make_plan(team);
        const auto found = run_steps(planned, all, [&](const Sizes& sizes) { plan.replay(team, sizes); });
        for (size_t i = 0; i < found.size(); ++i)
            expect(found[i] == expected[i], std::string(c.format) + " replayed on " + name + ", step " + std::to_string(i));
        expect(planned.stores_the_same(want), std::string(c.format) + " stored on " + name);
    });
}

}  // namespace

void test_plan() {
    const ModelCase usual{"Q4_1", KvType::F16, 32, false};
    compare(usual, true, {2});
    compare(usual, false, {1, 5});
    for (const ModelCase& c : {ModelCase{"Q8_0", KvType::I8, 16, false}, ModelCase{"Q4_0", KvType::F32, 20, true},
                               ModelCase{"BF16", KvType::F16, 64, true}})
        compare(c, false, {1, 3});
}

}  // namespace headrace
