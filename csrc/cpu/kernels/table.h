// What a kernel unit offers to the rest of the library: plain records and function pointers.
//
// A unit is `unit.cpp` compiled for one instruction set. Kernels work on one piece of work (some rows times some columns);
// `ops` cuts work into pieces and `Team` hands them to threads.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace headrace {

// How a panel of 16 output rows stores its numbers. `I8M` are bytes with a minimum (5-bit weights).
enum class Format : int { F32, F16, BF16, I8, I8M, I8G16, I4 };

enum class Activation : int { Silu, Gelu, GeluTanh };

enum class KvType : int { F32, F16, I8 };

constexpr int kPanel = 16;       // outputs of a panel
constexpr int kGroup = 32;       // k of a quantisation group
constexpr int kTile = 16;        // rows of a tile of quantised activations
constexpr int kRange = 64;       // tokens of an attention range
constexpr int kPeakBlock = 64;   // logits that are passed over at once
constexpr int kMaxHeadDim = 512;

constexpr bool is_float(Format f) { return f == Format::F32 || f == Format::F16 || f == Format::BF16; }
constexpr bool has_min(Format f) { return f == Format::I4 || f == Format::I8M; }

// Panels: [k][16] numbers for float formats; otherwise group after group, each with its bytes [k / 4][16][4] (I4: two k
// halves in the nibbles) followed by its scales, d[16] then m[16] (I8G16: d of both halves). One linear stream, because
// the prefetchers of the memory lose half of its bandwidth when numbers and scales lie apart.
constexpr size_t group_bytes(Format f) { return f == Format::I4 ? 256 : 512; }
constexpr size_t scale_bytes(Format f, bool wide) {
    return (f == Format::I8G16 ? 128 : has_min(f) ? 64 : 32) * (wide && f != Format::I8G16 ? 2 : 1);
}
constexpr size_t group_stride(Format f, bool wide) { return group_bytes(f) + scale_bytes(f, wide); }
constexpr size_t panel_bytes(Format f, bool wide, int k) {
    const size_t bytes = f == Format::F32   ? size_t(k) * 64
                         : is_float(f)      ? size_t(k) * 32
                                            : size_t(k / kGroup) * group_stride(f, wide);
    return (bytes + 63) / 64 * 64;
}

// Quantised activations: tiles of 16 rows, group after group of 32 k. A row of a group with its scale, its scaled sum and
// -128 times its integer sum fills one cache line: threads quantise rows, and no line may travel between them twice.
struct ActivationRow {
    int8_t q[kGroup];
    float scale;
    float scaled_sum;
    int32_t correction;
    int32_t unused[5];
};
static_assert(sizeof(ActivationRow) == 64);

struct ActivationGroup {
    ActivationRow rows[kTile];
};

constexpr size_t activation_bytes(int rows, int k) {
    return size_t((rows + kTile - 1) / kTile) * size_t(k / kGroup) * sizeof(ActivationGroup);
}

// Rows [row_begin, row_end) of x times some panels. Columns count from `out`; only `cols` of them exist.
struct GemmTask {
    Format format;
    bool wide_scales;
    int k;
    const uint8_t* panels;
    size_t panel_stride;
    int num_panels;
    const ActivationGroup* xq;  // int8 activations: all tiles of the batch
    const float* x;             // exact activations: row-major
    int64_t ldx;
    int row_begin, row_end;
    float* out;
    int64_t ldo;
    int cols;
    const float* bias;
    float softcap;
};

struct RopeTask {
    float* qkv;
    int num_heads, num_kv_heads, head_dim, rotary_dim;
    const float* cos_sin;  // of the token's position, cosines first
    const float* q_norm;   // weights over head_dim, or null
    const float* k_norm;
    bool full_norm;        // weights and mean over all heads instead
    float norm_eps;
    float* q_out;
    KvType kv_type;
    void* key;      // the token's block: [kv_head][head_dim][block_size]; null stores nothing
    void* value;    // [kv_head][block_size][head_dim]
    float* scales;  // [kv_head][2][block_size], keys first
    int block_size, offset;
};

// Queries of `num_rows` consecutive tokens of one request against `num_kv_heads` consecutive kv heads (one of them when there
// are several rows), over ranges [range_begin, range_end). At most kMaxPairs pairs of row and query head.
struct AttendTask {
    const float* q;  // first row, first query head
    int64_t ldq;
    int num_rows, group, head_dim;  // `group` query heads share the kv head
    int first_position;
    bool exact;  // float32 factors; otherwise bfloat16
    float scale, softcap;  // scale > 0
    int window, chunk;
    const float* sinks;  // of the query heads, or null
    KvType kv_type;
    const void* key;     // all blocks
    const void* value;
    const float* scales;
    int64_t key_stride, value_stride, scale_stride;  // elements from block to block
    const int32_t* blocks;                           // the request's row of the block table
    int block_size, kv_head, num_kv_heads;
    int range_begin, range_end;
    float* out;  // like q; null when partial results are wanted
    int64_t ldo;
    float* partials;  // of absolute range 0: per head maximum, sum, then head_dim values; one row only
    int64_t partial_stride;  // floats from range to range
    float* scratch;   // attend_scratch_floats
    const AttendTask* next;  // of the same layer: its first range is fetched meanwhile; or null
};

constexpr int padded_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }
constexpr int kMaxPairs = 96;  // query rows times group in one task
constexpr size_t attend_scratch_floats(int head_dim) {
    const size_t d = padded_dim(head_dim);
    return 2 * kRange * d + kMaxPairs * (2 * d + 2) + 2 * kRange;
}

// The greatest logit of a row so far; nothing yet has the largest id and minus infinity.
struct Best {
    float value;
    int32_t id;
};

// A token that may win a draw.
struct Contender {
    int32_t id;
    uint32_t hash;
};

struct Kernels {
    const char* name;
    void (*gemm_int)(const GemmTask&);
    void (*gemm_float)(const GemmTask&, float* scratch);
    // Groups [group_begin, group_end) of rows [row_begin, row_end): x points at row_begin, group_begin.
    void (*quantize)(const float* x, int64_t ldx, int row_begin, int row_end, int group_begin, int group_end, int groups,
                     ActivationGroup* xq);
    void (*gate)(Activation activation, const float* gate, const float* up, float* out, int n);
    // residual may be null; sum_out receives x + residual.
    void (*rms_norm)(const float* x, const float* residual, const float* weight, float eps, int n, float* out,
                     float* sum_out);
    void (*add)(const float* x, const float* y, float* out, int n);
    void (*scale_add)(float weight, const float* x, float* acc, int n);
    void (*scale)(float factor, float* x, int n);
    void (*embed)(Format format, bool wide_scales, int k, const uint8_t* panel, int lane, float scale, float* out);
    void (*rope_store)(const RopeTask&);
    void (*attend)(const AttendTask&);
    void (*merge_partials)(bool exact, const float* partials, int num_ranges, int64_t range_stride, int head_dim,
                           const float* sink, float* out);
    int (*arg_max)(const float* x, int n);
    void (*softmax)(const float* x, int n, float* out);
    // Tokens whose value and noise under the key may reach `least`, ascending; returns how many. `out` has room for n + 1.
    int (*find_contenders)(const float* x, int n, uint32_t key_low, uint32_t key_high, float least, Contender* out);
    void (*apply_bitmask)(float* x, const uint32_t* words, int n);
    void (*apply_penalties)(float* x, const uint8_t* in_prompt, const int32_t* counts, int n, float repetition, float frequency,
                            float presence);
    void (*scale_logits)(float* x, int n, float peak, float temperature);
    // The greatest of every kPeakBlock values; infinity when one is infinite or not a number.
    void (*block_peaks)(const float* x, int n, float* peaks);
    // 2^34 exp(x - peak) as integers, whose sums do not depend on their order.
    void (*weigh)(const float* x, int n, float peak, int64_t* weights);
    // Folds `cols` logits of tokens from `first_id` into each row's best: the greatest, the lowest id of equals; infinity when
    // one is not finite. Tiles may come in any order.
    void (*find_best)(const float* tile, int64_t ld, int rows, int cols, int first_id, Best* best);
};

constexpr size_t kGemmFloatScratch = 128 * 64 + 4 * 128 * 16;  // floats

const Kernels* kernels_generic();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512_vnni();
const Kernels* kernels_avx512_bf16();
const Kernels* kernels_neon();

}  // namespace headrace
