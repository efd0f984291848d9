#include "step_inputs.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace headrace {

int StepInputs::check(const int64_t* rows, const int64_t* num_computed, const int64_t* num_new, int reqs) const {
    if (reqs < 0 || reqs > max_reqs) throw std::out_of_range(std::to_string(reqs) + " requests exceed " + std::to_string(max_reqs));
    int64_t tokens = 0;
    for (int i = 0; i < reqs; ++i) {
        if (rows[i] < 0 || rows[i] >= max_rows) throw std::out_of_range("row " + std::to_string(rows[i]) + " does not exist");
        // Differences of what is in bounds already: sums of what the caller gives may overflow.
        if (num_computed[i] < 0 || num_computed[i] > row_tokens || num_new[i] < 1 || num_new[i] > row_tokens - num_computed[i])
            throw std::out_of_range("a row of " + std::to_string(row_tokens) + " tokens cannot compute " +
                                    std::to_string(num_new[i]) + " behind " + std::to_string(num_computed[i]));
        const int64_t length = num_computed[i] + num_new[i];
        for (const TableGroup& group : groups)
            if (int64_t(group.num_blocks[rows[i]]) * group.block_size < length)
                throw std::out_of_range("a scheduled token has no block");
        tokens += num_new[i];
    }
    if (tokens > max_tokens)
        throw std::out_of_range("a step of " + std::to_string(tokens) + " tokens exceeds the " + std::to_string(max_tokens) +
                                " that inputs hold");
    return int(tokens);
}

int StepInputs::fill(const int64_t* rows, const int64_t* num_computed, const int64_t* num_new, int reqs) const {
    const int tokens = check(rows, num_computed, num_new, reqs);
    int first = 0;
    for (int i = 0; i < reqs; ++i) {
        query_start_loc[i] = first;
        fill_request(i, int(rows[i]), int(num_computed[i]), int(num_new[i]), first);
        first += int(num_new[i]);
    }
    query_start_loc[reqs] = first;
    return tokens;
}

void StepInputs::fill_request(int i, int row, int computed, int count, int first) const {
    const int length = computed + count;
    seq_lens[i] = length;
    std::copy_n(token_ids + int64_t(row) * row_tokens + computed, count, ids + first);
    for (int t = 0; t < count; ++t) positions[first + t] = computed + t;
    for (const TableGroup& group : groups) {
        const int32_t* blocks = group.table + int64_t(row) * group.max_blocks;
        std::copy_n(blocks, group.max_blocks, group.step_table + int64_t(i) * group.max_blocks);
        for (int t = 0; t < count; ++t) {
            const int position = computed + t;
            group.slots[first + t] = int64_t(blocks[position / group.block_size]) * group.block_size + position % group.block_size;
        }
    }
}

void StepInputs::pad(int reqs, int begin, int end) const {
    std::fill(ids + begin, ids + end, 0);
    std::fill(positions + begin, positions + end, 0);
    std::fill(query_start_loc + reqs + 1, query_start_loc + max_reqs + 1, begin);
    std::fill(seq_lens + reqs, seq_lens + max_reqs, 0);
    for (const TableGroup& group : groups) std::fill(group.slots + begin, group.slots + end, int64_t(-1));
}

}  // namespace headrace
