// The buffers of a step: filled as a plain loop would, and not at all when something does not fit.

#include <algorithm>

#include "../step_inputs.h"
#include "support.h"
#include "tests.h"

namespace headrace {

namespace {

struct Memory {
    static constexpr int max_rows = 6, row_tokens = 90, max_tokens = 100, max_reqs = 5;
    struct Group {
        int block_size, max_blocks;
        std::vector<int32_t> table, num_blocks, step_table;
        std::vector<int64_t> slots;
        bool operator==(const Group&) const = default;
    };
    std::vector<int32_t> tokens, ids, positions, starts, lens;
    std::vector<Group> groups;
    bool operator==(const Memory&) const = default;

    explicit Memory(Random& random) : ids(max_tokens), positions(max_tokens), starts(max_reqs + 1), lens(max_reqs) {
        for (int i = 0; i < max_rows * row_tokens; ++i) tokens.push_back(random.below(1000));
        for (const int block_size : {16, 7}) {
            Group group{block_size, (row_tokens + block_size - 1) / block_size, {}, {}, {}, {}};
            for (int i = 0; i < max_rows * group.max_blocks; ++i) group.table.push_back(random.below(1000));
            group.num_blocks.assign(max_rows, group.max_blocks);
            group.step_table.resize(size_t(max_reqs * group.max_blocks));
            group.slots.resize(max_tokens);
            groups.push_back(group);
        }
    }

    StepInputs view() {
        StepInputs inputs{tokens.data(), max_rows,      row_tokens,    max_tokens, max_reqs,
                          ids.data(),    positions.data(), starts.data(), lens.data(), {}};
        for (Group& g : groups)
            inputs.groups.push_back({g.table.data(), g.num_blocks.data(), g.max_blocks, g.block_size, g.step_table.data(),
                                     g.slots.data()});
        return inputs;
    }
};

void check_step(Random& random) {
    Memory memory(random);
    const int reqs = random.below(Memory::max_reqs + 1);
    std::vector<int64_t> rows, computed, added;
    std::vector<int32_t> ids, positions, starts{0}, lens;
    std::vector<std::vector<int64_t>> slots(memory.groups.size());
    for (int i = 0; i < reqs; ++i) {
        rows.push_back(random.below(Memory::max_rows));
        added.push_back(1 + random.below(Memory::max_tokens / Memory::max_reqs));
        computed.push_back(random.below(Memory::row_tokens - int(added.back()) + 1));
        for (int64_t p = computed.back(); p < computed.back() + added.back(); ++p) {
            ids.push_back(memory.tokens[size_t(rows.back() * Memory::row_tokens + p)]);
            positions.push_back(int32_t(p));
            for (size_t g = 0; g < slots.size(); ++g) {
                const auto& group = memory.groups[g];
                const int32_t block = group.table[size_t(rows.back() * group.max_blocks + p / group.block_size)];
                slots[g].push_back(int64_t(block) * group.block_size + p % group.block_size);
            }
        }
        starts.push_back(int32_t(ids.size()));
        lens.push_back(int32_t(computed.back() + added.back()));
    }
    const int tokens = memory.view().fill(rows.data(), computed.data(), added.data(), reqs);
    expect(tokens == int(ids.size()), "the number of tokens");
    memory.view().pad(reqs, tokens, Memory::max_tokens);
    ids.resize(Memory::max_tokens);
    positions.resize(Memory::max_tokens);
    starts.resize(Memory::max_reqs + 1, tokens);
    lens.resize(Memory::max_reqs);
    expect(memory.ids == ids && memory.positions == positions, "the step's tokens");
    expect(memory.starts == starts && memory.lens == lens, "the step's lengths");
    for (size_t g = 0; g < slots.size(); ++g) {
        const auto& group = memory.groups[g];
        slots[g].resize(Memory::max_tokens, -1);
        bool fine = group.slots == slots[g];
        for (int i = 0; i < reqs; ++i) {
            const auto first = group.table.begin() + rows[size_t(i)] * group.max_blocks;
            fine = fine && std::equal(first, first + group.max_blocks, group.step_table.begin() + i * group.max_blocks);
        }
        expect(fine, "the step's slots and tables");
    }
}

}  // namespace

void test_step_inputs() {
    Random random(8);
    for (int round = 0; round < 200; ++round) check_step(random);

    Memory memory(random);
    memory.groups[1].num_blocks[3] = 1;
    const Memory before = memory;
    struct Case {
        std::vector<int64_t> rows, computed, added;
        const char* what;
    };
    const int64_t most = INT64_MAX;
    for (const Case& c : {Case{{6}, {0}, {1}, "a row past the last"}, Case{{-1}, {0}, {1}, "a negative row"},
                          Case{{most}, {0}, {1}, "the largest row"}, Case{{0}, {-1}, {1}, "a negative start"},
                          Case{{0}, {0}, {0}, "no tokens"}, Case{{0}, {90}, {1}, "a token past the row"},
                          Case{{0}, {most}, {1}, "a sum that overflows"}, Case{{0}, {1}, {most}, "a sum that overflows"},
                          Case{{0}, {-most}, {most}, "a difference that overflows"}, Case{{3}, {0}, {8}, "a token without a block"},
                          Case{{0, 1}, {0, 0}, {60, 41}, "more tokens than have room"},
                          Case{{0, 1, 2, 3, 4, 5}, {0, 0, 0, 0, 0, 0}, {1, 1, 1, 1, 1, 1}, "more requests than have room"}})
        expect_error<std::out_of_range>(
            c.what, [&] { memory.view().fill(c.rows.data(), c.computed.data(), c.added.data(), int(c.rows.size())); });
    expect_error<std::out_of_range>("a negative number of requests",
                                    [&] { memory.view().fill(nullptr, nullptr, nullptr, -1); });
    expect(memory == before, "what does not fit writes nothing");
}

}  // namespace headrace
