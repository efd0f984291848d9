// Ops: a kernel with its buffers, ready to run on any number of rows up to those of its buffers.
//
// The same object serves eager calls and captured plans, which is why both give the same bits. Buffers are not owned.
// `check` finds what would touch memory out of bounds (ids, slots, block tables) before anything runs; `reserve` grows the
// team's shared memory; `run` is called on every thread of the team.
#pragma once

#include <climits>
#include <memory>
#include <string>
#include <vector>

#include "team.h"
#include "weight.h"

namespace headrace {

// `best_rows` of the rows of logits come first and need nothing but their greatest one.
struct Sizes {
    int tokens = 0, reqs = 0, logit_rows = 0, best_rows = 0;
};

// Which size counts the rows of an op.
enum class Rows : int { Tokens, Logits };

inline int count_rows(Rows rows, const Sizes& sizes) { return rows == Rows::Tokens ? sizes.tokens : sizes.logit_rows; }

inline int64_t address(const void* p) { return int64_t(reinterpret_cast<uintptr_t>(p)); }

class Op {
public:
    virtual ~Op() = default;
    virtual const char* name() const = 0;
    // Throws std::out_of_range. Ops of one name with equal keys check the same inputs against the same bounds.
    virtual void check(const Sizes&) const {}
    virtual std::vector<int64_t> check_key() const { return {}; }
    // What its buffers have room for. Throws std::out_of_range.
    static constexpr Sizes kUnlimited{INT_MAX, INT_MAX, INT_MAX, INT_MAX};
    Sizes room = kUnlimited;
    void check_room(const Sizes&) const;
    virtual void reserve(Team&, const Sizes& most) const = 0;
    virtual void run(Team&, int tid, const Sizes&) const = 0;
    virtual std::vector<const void*> reads() const = 0;
    virtual std::vector<const void*> writes() const = 0;
};

// An op whose rows do not see each other: a thread may take some rows through several such ops while others take theirs.
class RowOp : public Op {
public:
    virtual Rows rows_of() const = 0;
    // Rows [begin, end), at most kRowBlock, on the calling thread alone.
    virtual void run_rows(Team&, int tid, int begin, int end) const = 0;
    // Whether rows gain from being together: exact products widen weights once for all of them.
    virtual bool keeps_rows_together() const { return false; }
};

struct EmbeddingOp : RowOp {
    const int32_t* ids;
    std::shared_ptr<Weight> table;
    float scale;
    float* out;
    const char* name() const override { return "embedding"; }
    void check(const Sizes&) const override;
    std::vector<int64_t> check_key() const override { return {address(ids), table->out_features}; }
    void reserve(Team&, const Sizes&) const override {}
    void run(Team&, int tid, const Sizes&) const override;
    Rows rows_of() const override { return Rows::Tokens; }
    void run_rows(Team&, int tid, int begin, int end) const override;
    std::vector<const void*> reads() const override { return {ids}; }
    std::vector<const void*> writes() const override { return {out}; }
};

// rms_norm, or add_rms_norm when there is a residual.
struct NormOp : RowOp {
    Rows rows;
    int width;
    const float* x;
    const float* residual = nullptr;
    const float* weight;
    float eps;
    float* out;
    float* sum_out = nullptr;
    const char* name() const override { return residual ? "add_rms_norm" : "rms_norm"; }
    void reserve(Team&, const Sizes&) const override;
    void run(Team&, int tid, const Sizes&) const override;
    Rows rows_of() const override { return rows; }
    void run_rows(Team&, int tid, int begin, int end) const override;
    // One row, to `to` instead of `out`.
    void run_row(const Kernels&, int row, float* to) const;
    std::vector<const void*> reads() const override { return {x, residual}; }
    std::vector<const void*> writes() const override { return {out, sum_out}; }
};

struct AddOp : RowOp {
    Rows rows;
    int width;
    const float *x, *y;
    float* out;
    const char* name() const override { return "add"; }
    void reserve(Team&, const Sizes&) const override {}
    void run(Team&, int tid, const Sizes&) const override;
    Rows rows_of() const override { return rows; }
    void run_rows(Team&, int tid, int begin, int end) const override;
    std::vector<const void*> reads() const override { return {x, y}; }
    std::vector<const void*> writes() const override { return {out}; }
};

struct GatherOp : Op {
    int width;
    const float* x;
    const int32_t* index;
    float* out;
    const char* name() const override { return "gather_rows"; }
    void check(const Sizes&) const override;
    std::vector<int64_t> check_key() const override { return {address(index)}; }
    void reserve(Team&, const Sizes&) const override {}
    void run(Team&, int tid, const Sizes&) const override;
    std::vector<const void*> reads() const override { return {x, index}; }
    std::vector<const void*> writes() const override { return {out}; }
};

// Inputs of a product: rows of x, exact or quantised on the way, normed on the way when a plan has fused a norm.
struct ProductInput {
    Rows rows;
    int width;
    const float* x;
    bool exact;
    std::shared_ptr<NormOp> norm;  // fused: rows come from it
    bool ready = false;            // fused: the producer has quantised them to Shared::GatedActivations
    void reserve(Team&, const Sizes& most) const;
    // Makes the quantised tiles (or nothing for exact inputs) and returns them.
    const ActivationGroup* prepare(Team&, int tid, int num_rows) const;
    // The thread's own tiles, of rows [begin, end) counted from `begin`.
    const ActivationGroup* prepare_rows(Team&, int tid, int begin, int end) const;

private:
    // Rows [begin, end) to tiles that count from row `first`.
    void quantize_rows(Team&, int tid, int begin, int end, int first, ActivationGroup* xq) const;
};

struct LinearOp : RowOp {
    ProductInput input;
    std::shared_ptr<Weight> weight;
    const float* bias = nullptr;
    float softcap = 0;
    float* out;
    const char* name() const override { return "linear"; }
    void reserve(Team&, const Sizes& most) const override;
    void run(Team&, int tid, const Sizes&) const override;
    Rows rows_of() const override { return input.rows; }
    void run_rows(Team&, int tid, int begin, int end) const override;
    bool keeps_rows_together() const override { return input.exact; }
    std::vector<const void*> reads() const override { return {input.x}; }
    std::vector<const void*> writes() const override { return {out}; }
};

struct GatedOp : RowOp {
    ProductInput input;
    std::shared_ptr<Weight> weight;  // two segments of equal shape
    Activation activation;
    float* out;
    bool quantized_out = false;  // fused: to Shared::GatedActivations instead of `out`
    const char* name() const override { return "gated_linear"; }
    void reserve(Team&, const Sizes& most) const override;
    void run(Team&, int tid, const Sizes&) const override;
    Rows rows_of() const override { return input.rows; }
    void run_rows(Team&, int tid, int begin, int end) const override;
    bool keeps_rows_together() const override { return input.exact; }
    std::vector<const void*> reads() const override { return {input.x}; }
    std::vector<const void*> writes() const override { return {out}; }
};

// Blocks of one layer.
struct CacheView {
    KvType type;
    int num_blocks, block_size, num_kv_heads, head_dim;
    void *key, *value;
    float* scales = nullptr;
    int64_t key_stride, value_stride, scale_stride = 0;  // elements from block to block
    size_t element() const { return type == KvType::F32 ? 4 : type == KvType::F16 ? 2 : 1; }
};

// One group's step inputs; buffers may be longer than a step.
struct StepView {
    const int32_t* query_start_loc;
    const int32_t* seq_lens;
    const int32_t* block_table;
    int64_t table_stride;
    int max_blocks;
    const int64_t* slot_mapping;
    int max_reqs, max_tokens;
};

struct RopeOp : RowOp {
    float* qkv;
    int num_heads, rotary_dim, max_position;
    const int32_t* positions;
    const float* cos_sin;
    const float *q_norm = nullptr, *k_norm = nullptr;
    bool full_norm = false;
    float norm_eps = 0;
    StepView step;
    CacheView cache;
    float* q_out;
    const char* name() const override { return "rotate_and_store"; }
    void check(const Sizes&) const override;
    std::vector<int64_t> check_key() const override;
    void reserve(Team&, const Sizes&) const override {}
    void run(Team&, int tid, const Sizes&) const override;
    Rows rows_of() const override { return Rows::Tokens; }
    void run_rows(Team&, int tid, int begin, int end) const override;
    std::vector<const void*> reads() const override { return {qkv}; }
    std::vector<const void*> writes() const override { return {q_out}; }
};

struct HeadCut;

struct AttentionOp : Op {
    const float* q;
    int num_heads, window, chunk;
    bool exact;
    float scale, softcap;
    const float* sinks = nullptr;
    StepView step;
    CacheView cache;
    float* out;
    const char* name() const override { return "attention"; }
    void check(const Sizes&) const override;
    std::vector<int64_t> check_key() const override;
    void reserve(Team&, const Sizes& most) const override;
    void run(Team&, int tid, const Sizes&) const override;
    std::vector<const void*> reads() const override { return {q}; }
    std::vector<const void*> writes() const override { return {out}; }

private:
    AttendTask task(int req, int first_row, int num_rows, const HeadCut& cut, int index) const;
    void run_whole(Team&, int tid, const Sizes&) const;
    void run_split(Team&, int tid, const Sizes&) const;
};

struct MoeOp : Op {
    LinearOp router;  // its `out` is not used
    std::vector<std::shared_ptr<Weight>> gate_up, down;
    int top_k;
    Activation activation;
    bool renormalize, exact;
    float* out;
    const char* name() const override { return "moe"; }
    void reserve(Team&, const Sizes& most) const override;
    void run(Team&, int tid, const Sizes&) const override;
    std::vector<const void*> reads() const override { return {router.input.x}; }
    std::vector<const void*> writes() const override { return {out}; }
};

struct ArgMaxOp : Op {
    int width;
    const float* x;
    int32_t* out;
    const char* name() const override { return "arg_max"; }
    void reserve(Team&, const Sizes&) const override {}
    void run(Team&, int tid, const Sizes&) const override;
    std::vector<const void*> reads() const override { return {x}; }
    std::vector<const void*> writes() const override { return {out}; }
};

// Checks, then runs one op on the team.
void run_op(Team& team, const Op& op, const Sizes& sizes);

}  // namespace headrace
