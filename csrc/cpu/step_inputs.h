// Fills the buffers that a forward reads: token ids, positions, lengths, block tables and slots of a step.
//
// Memory is the caller's and must outlive this object. Nothing is written before all rows have been checked.
#pragma once

#include <cstdint>
#include <vector>

namespace headrace {

// Block ids of all rows, and where those of a step go.
struct TableGroup {
    const int32_t* table;  // [max_rows][max_blocks]
    const int32_t* num_blocks;
    int max_blocks, block_size;
    int32_t* step_table;  // [max_reqs][max_blocks]
    int64_t* slots;       // [max_tokens]
};

struct StepInputs {
    const int32_t* token_ids;  // [max_rows][row_tokens]
    int max_rows, row_tokens, max_tokens, max_reqs;
    int32_t *ids, *positions, *query_start_loc, *seq_lens;
    std::vector<TableGroup> groups;

    // Request `i` stands in row `rows[i]` and computes `num_new[i]` tokens behind its first `num_computed[i]`. Returns the
    // number of tokens; throws std::out_of_range.
    int fill(const int64_t* rows, const int64_t* num_computed, const int64_t* num_new, int reqs) const;
    // Tokens from `begin` to `end` become padding, and no request stands behind `reqs`.
    void pad(int reqs, int begin, int end) const;

private:
    int check(const int64_t* rows, const int64_t* num_computed, const int64_t* num_new, int reqs) const;
    void fill_request(int i, int row, int computed, int count, int first) const;
};

}  // namespace headrace
