// Paged attention: some query rows of one request against one kv head, or one row against several, range by range.
//
// Pairs of row and query head go through a range in blocks of a few: dots, probabilities and values of a block stay in
// registers and L1. A block reads only keys that one of its rows sees.
#pragma once

#include "rows.h"

namespace headrace::HR_ISA {

// Working memory of one task, carved from its scratch.
struct AttendState {
    float *keys, *values;  // a widened range: [head_dim][64], [64][padded]
    float* sum;            // O: [pairs][padded]
    float *top, *total;    // M and L of each pair
    float *key_scales, *value_scales;
};

// Where a range of one kv head lies. Keys of N tokens from d = 0, `stride` from d to d.
template <class T>
struct Place {
    const T* keys[kRange / N];
    const T* values[kRange];
    int64_t stride;
    int count;  // tokens; none when there is no such range
};

constexpr int kPairs = 6;                          // pairs of a block
constexpr int kVectors = kManyRegisters ? 4 : 2;   // of keys or values at once: a block's sums fill the registers

// dots[pair][64] = q . k over tokens of `vectors` vectors; keys[v] points at d = 0. `ahead` is fetched meanwhile.
template <class T, int pairs, int vectors>
HR_KERNEL void dot_tile(const float* const* q, int dim, const T* const* keys, int64_t stride, const T* const* ahead,
                        float* dots) {
    VF acc[pairs][vectors];
    for (int p = 0; p < pairs; ++p)
        for (int v = 0; v < vectors; ++v) acc[p][v] = zero();
    for (int d = 0; d < dim; ++d) {
        VF k[vectors];
        for (int v = 0; v < vectors; ++v) k[v] = load_weight(keys[v] + d * stride);
        if (ahead) {
            // A vector of float16 keys is half a cache line; its neighbour shares it in blocks of more than 16.
            constexpr int step = sizeof(T) * N < 64 ? 64 / (sizeof(T) * N) : 1;
            for (int v = 0; v < vectors; v += step) prefetch_far(ahead[v] + d * stride);
        }
#pragma GCC unroll 8
        for (int p = 0; p < pairs; ++p) {
            const VF qd = bcast(q[p][d]);
            for (int v = 0; v < vectors; ++v) acc[p][v] = fma(qd, k[v], acc[p][v]);
        }
    }
    for (int p = 0; p < pairs; ++p)
        for (int v = 0; v < vectors; ++v) store(dots + p * kRange + v * N, acc[p][v]);
}

// A block of pairs of one range on its way to its sums.
template <int pairs>
struct Block {
    alignas(64) float weights[pairs * kRange];  // dots, then p
    float top[N > pairs ? N : pairs], total[N > pairs ? N : pairs];  // m and l
    float old_part[N > pairs ? N : pairs], new_part[N > pairs ? N : pairs];  // a and b
    float* out;  // rows of sums, or of what the range alone gives
    int64_t out_step;
    int out_dim;
    bool fold;  // into the sums
};

// o[pair][d..] = sum over tokens [begin, end) of p[pair][token] * value[token][d..], to its place.
template <class T, int pairs, int vectors>
HR_KERNEL void value_tile(const Block<pairs>& block, const T* const* values, int d, int begin, int end,
                          const Place<T>* ahead) {
    VF acc[pairs][vectors];
    for (int i = 0; i < pairs; ++i)
        for (int v = 0; v < vectors; ++v) acc[i][v] = zero();
    for (int j = begin; j < end; ++j) {
        VF x[vectors];
        for (int v = 0; v < vectors; ++v) x[v] = load_weight(values[j] + d + v * N);
        if (ahead && j < ahead->count)
            for (int at = 0; at < vectors * N; at += 64 / int(sizeof(T))) prefetch_far(ahead->values[j] + d + at);
#pragma GCC unroll 8
        for (int i = 0; i < pairs; ++i) {
            const VF w = bcast(block.weights[i * kRange + j]);
            for (int v = 0; v < vectors; ++v) acc[i][v] = fma(w, x[v], acc[i][v]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < pairs; ++i) {
        if (block.total[i] == 0) continue;  // nothing of the range is visible
        float* out = block.out + i * block.out_step + d;
        for (int v = 0; v < vectors; ++v) {
            VF o = acc[i][v];
            if (block.fold)
                o = fma(load(out + v * N), bcast(block.old_part[i]), mul(o, bcast(block.new_part[i])));
            const int n = part(block.out_dim, d + v * N);
            if (n == N) store(out + v * N, o);
            else store_part(out + v * N, o, n);
        }
    }
}

HR_INLINE int first_visible(const AttendTask& t, int position) {
    int lo = 0;
    if (t.window > 0 && position - t.window + 1 > lo) lo = position - t.window + 1;
    if (t.chunk > 0 && position / t.chunk * t.chunk > lo) lo = position / t.chunk * t.chunk;
    return lo;
}

// Tokens [begin, end) of the range from `first` that any row of the task sees. Others are not even read: their blocks may be
// another request's, or nobody's.
HR_INLINE int begin_of(const AttendTask& t, int first) {
    const int oldest = first_visible(t, t.first_position) - first;
    return oldest > 0 ? oldest : 0;
}
HR_INLINE int end_of(const AttendTask& t, int first) {
    const int rest = t.first_position + t.num_rows - first;
    return rest < 0 ? 0 : rest < kRange ? rest : kRange;
}

// Calls stretch(j, block, offset, count) for the visible tokens j of the range from `first`, block by block.
template <class F>
HR_INLINE void for_blocks(const AttendTask& t, int first, F&& stretch) {
    const int end = end_of(t, first);
    int j = begin_of(t, first), index = (first + j) / t.block_size, offset = (first + j) % t.block_size;
    for (; j < end; ++index, offset = 0) {
        const int room = t.block_size - offset, count = end - j < room ? end - j : room;
        stretch(j, int64_t(t.blocks[index]), offset, count);
        j += count;
    }
}

template <class T>
HR_INLINE const T* keys_of(const AttendTask& t, int head, int64_t block) {
    return (const T*)t.key + block * t.key_stride + int64_t(t.kv_head + head) * t.head_dim * t.block_size;
}

template <class T>
HR_INLINE const T* values_of(const AttendTask& t, int head, int64_t block) {
    return (const T*)t.value + block * t.value_stride + int64_t(t.kv_head + head) * t.block_size * t.head_dim;
}

// Blocks must be whole vectors. What nobody sees points at something visible: what that gives is masked.
template <class T>
HR_INLINE void locate(const AttendTask& t, int head, int first, Place<T>& place) {
    place.count = end_of(t, first);
    place.stride = t.block_size;
    int next_key = 0, next_value = 0;
    for_blocks(t, first, [&](int j, int64_t block, int offset, int count) {
        const T* keys = keys_of<T>(t, head, block) + offset - j;
        for (; next_key * N < j + count; ++next_key) place.keys[next_key] = keys + (next_key * N > j ? next_key * N : j / N * N);
        const T* value = values_of<T>(t, head, block) + int64_t(offset) * t.head_dim;
        for (; next_value < j; ++next_value) place.values[next_value] = value;
        for (; next_value < j + count; ++next_value, value += t.head_dim) place.values[next_value] = value;
    });
    for (; next_key < kRange / N; ++next_key) place.keys[next_key] = place.keys[next_key - 1];
}

HR_INLINE float widen_one(const float* p) { return *p; }
HR_INLINE float widen_one(const int8_t* p) { return float(*p); }
HR_INLINE float widen_one(const Half* p) {
    alignas(64) uint16_t lanes[N] = {p->bits};
    alignas(64) float out[N];
    store(out, load_f16(lanes));
    return out[0];
}

// Copies a range to float scratch. Values are padded with zeros to a multiple of 16.
template <class T>
static void widen_range(const AttendTask& t, int head, int first, const AttendState& s, Place<float>& place) {
    const int padded = padded_dim(t.head_dim);
    place.count = end_of(t, first);
    place.stride = kRange;
    for (int v = 0; v < kRange / N; ++v) place.keys[v] = s.keys + v * N;
    for (int j = 0; j < kRange; ++j) place.values[j] = s.values + j * padded;
    for_blocks(t, first, [&](int j, int64_t block, int offset, int count) {
        const T* keys = keys_of<T>(t, head, block) + offset;
        for (int d = 0; d < t.head_dim; ++d, keys += t.block_size)
            for (int i = 0; i < count; ++i) s.keys[d * kRange + j + i] = widen_one(keys + i);
        const T* values = values_of<T>(t, head, block) + int64_t(offset) * t.head_dim;
        for (int i = 0; i < count; ++i, values += t.head_dim) {
            float* out = s.values + (j + i) * padded;
            int d = 0;
            for (; d + N <= t.head_dim; d += N) store(out + d, load_weight(values + d));
            for (; d < t.head_dim; ++d) out[d] = widen_one(values + d);
            for (; d < padded; ++d) out[d] = 0;
        }
    });
}

static void load_scales(const AttendTask& t, int head, int first, const AttendState& s) {
    for (int j = 0; j < kRange; j += N) {
        store(s.key_scales + j, zero());
        store(s.value_scales + j, zero());
    }
    for_blocks(t, first, [&](int j, int64_t block, int offset, int count) {
        const float* scales = t.scales + block * t.scale_stride + int64_t(t.kv_head + head) * 2 * t.block_size + offset;
        copy(scales, s.key_scales + j, count);
        copy(scales + t.block_size, s.value_scales + j, count);
    });
}

// Tokens of a range that a row sees.
struct Span {
    int begin, end;
};

HR_INLINE Span span_of(const AttendTask& t, int row, int first) {
    const int position = t.first_position + row, lo = first_visible(t, position) - first, hi = position + 1 - first;
    return {lo > 0 ? lo : 0, hi < kRange ? hi : kRange};
}

// Dots of one pair to scores in place, as far as they are visible; returns the maximum.
HR_INLINE float scores(const AttendTask& t, float* dots, const Span& span, const AttendState& s) {
    const VF scale = bcast(t.scale), hidden = bcast(-__builtin_inff());
    VF best = hidden;
    if (span.begin == 0 && span.end == kRange && t.kv_type != KvType::I8 && !(t.softcap > 0)) {
        for (int v = 0; v < kRange / N; ++v) {
            const VF x = mul(load(dots + v * N), scale);
            store(dots + v * N, x);
            best = max(best, x);
        }
        return reduce_max(best);
    }
    const VF low = bcast(float(span.begin)), high = bcast(float(span.end));
    for (int v = 0; v < kRange / N; ++v) {
        VF x = load(dots + v * N);
        if (t.kv_type == KvType::I8) x = mul(x, load(s.key_scales + v * N));
        x = mul(x, scale);
        if (t.softcap > 0) x = mul(bcast(t.softcap), tanh(div(x, bcast(t.softcap))));
        const VF index = add(to_float(iota()), bcast(float(v * N)));
        x = select_lt(index, low, hidden, x);
        x = select_lt(index, high, x, hidden);
        store(dots + v * N, x);
        best = max(best, x);
    }
    return reduce_max(best);
}

// Scores of one pair to probabilities in place; returns their sum.
HR_INLINE float probabilities(const AttendTask& t, float* weights, float top, const AttendState& s) {
    VF values[kRange / N];
    for (int v = 0; v < kRange / N; ++v) values[v] = exp_below(sub(load(weights + v * N), bcast(top)));
    W16 lanes;
    constexpr int step = 16 / N;
    for (int i = 0; i < step; ++i)
        lanes.v[i] = add(add(values[i], values[step + i]), add(values[2 * step + i], values[3 * step + i]));
    for (int v = 0; v < kRange / N; ++v) {
        if (t.kv_type == KvType::I8) values[v] = mul(values[v], load(s.value_scales + v * N));
        store(weights + v * N, values[v]);
    }
    return reduce_add(lanes);
}

// M, L and what the old and the new sums are scaled with.
HR_INLINE void fold_totals(int pairs, const float* m, const float* l, float* top, float* total, float* a, float* b) {
    for (int p = 0; p < pairs; p += N) {
        const int n = part(pairs, p);
        const VF mp = load_part(m + p, n), tp = load_part(top + p, n), higher = max(mp, tp);
        const VF ap = exp(sub(tp, higher)), bp = exp(sub(mp, higher));
        store_part(total + p, fma(load_part(total + p, n), ap, mul(load_part(l + p, n), bp)), n);
        store_part(top + p, higher, n);
        store_part(a + p, ap, n);
        store_part(b + p, bp, n);
    }
}

// Pairs [p, p + pairs) of one kv head through one range; pairs of all heads count from `first_pair`.
template <class T, int pairs>
static void attend_block(const AttendTask& t, const float* const* q, int p, int first_pair, int first, const Place<T>& here,
                         const Place<T>* ahead, const AttendState& s) {
    const int padded = padded_dim(t.head_dim);
    Span spans[pairs];
    for (int i = 0, row = p / t.group, in_row = p % t.group; i < pairs; ++i) {
        spans[i] = span_of(t, row, first);
        if (++in_row == t.group) in_row = 0, ++row;
    }
    const int begin = spans[0].begin, end = spans[pairs - 1].end;
    if (begin >= end) return;
    Block<pairs> block;
    float* dots = block.weights;
    const auto clear = [&](int v) {
        for (int i = 0; i < pairs; ++i) store(dots + i * kRange + v * N, zero());
    };
    int v = begin / N;
    for (int skipped = 0; skipped < v; ++skipped) clear(skipped);
    while (v * N < end) {
        const T* const* next = ahead && ahead->count ? ahead->keys + v : nullptr;
        // A single vector for less than all: as good when there are pairs enough to hide the latency of sums.
        if (pairs >= 4 && (v + kVectors) * N >= end + N) {
            dot_tile<T, pairs, 1>(q + p, t.head_dim, here.keys + v, here.stride, next, dots + v * N);
            v += 1;
        } else {
            v = v / kVectors * kVectors;
            next = next ? ahead->keys + v : nullptr;
            dot_tile<T, pairs, kVectors>(q + p, t.head_dim, here.keys + v, here.stride, next, dots + v * N);
            v += kVectors;
        }
    }
    for (; v < kRange / N; ++v) clear(v);
    for (int i = 0; i < pairs; ++i) {
        block.top[i] = scores(t, dots + i * kRange, spans[i], s);
        // Finite for those that see nothing, so that two of them differ by zero and not by a NaN.
        if (spans[i].begin >= spans[i].end) block.top[i] = -3e38f;
    }
    for (int i = 0; i < pairs; ++i) block.total[i] = probabilities(t, dots + i * kRange, block.top[i], s);
    p += first_pair;
    block.fold = !t.partials;
    if (t.partials) {
        block.out = t.partials + (first / kRange) * t.partial_stride + p * (t.head_dim + 2);
        block.out_step = t.head_dim + 2;
        block.out_dim = t.head_dim;
        for (int i = 0; i < pairs; ++i) {
            block.out[i * block.out_step] = block.top[i];
            block.out[i * block.out_step + 1] = block.total[i];
        }
        block.out += 2;
    } else {
        block.out = s.sum + p * padded;
        block.out_step = block.out_dim = padded;
        fold_totals(pairs, block.top, block.total, s.top + p, s.total + p, block.old_part, block.new_part);
    }
    int d = 0;
    for (; d + kVectors * N <= padded; d += kVectors * N)
        value_tile<T, pairs, kVectors>(block, here.values, d, begin, end, ahead);
    for (; d < padded; d += N) value_tile<T, pairs, 1>(block, here.values, d, begin, end, ahead);
    for (int j = end; ahead && j < ahead->count; ++j)
        for (int at = 0; at < t.head_dim; at += 64 / int(sizeof(T))) prefetch_far(ahead->values[j] + at);
}

// All pairs of kv head `head` through one range.
template <class T>
static void attend_range(const AttendTask& t, const float* const* q, int head, int first, const Place<T>& here,
                         const Place<T>* ahead, const AttendState& s) {
    const int pairs = t.num_rows * t.group, first_pair = head * pairs;
    q += first_pair;
    for (int p = 0; p < pairs; p += kPairs, ahead = nullptr) {
        switch (pairs - p) {
            case 1: attend_block<T, 1>(t, q, p, first_pair, first, here, ahead, s); break;
            case 2: attend_block<T, 2>(t, q, p, first_pair, first, here, ahead, s); break;
            case 3: attend_block<T, 3>(t, q, p, first_pair, first, here, ahead, s); break;
            case 4: attend_block<T, 4>(t, q, p, first_pair, first, here, ahead, s); break;
            case 5: attend_block<T, 5>(t, q, p, first_pair, first, here, ahead, s); break;
            default: attend_block<T, kPairs>(t, q, p, first_pair, first, here, ahead, s);
        }
    }
}

// Straight from the blocks: the vector units widen beside the sums at no cost. Heads follow each other within a range, as
// they lie in the blocks.
template <class T>
static void attend_direct(const AttendTask& t, const float* const* q, const AttendState& s) {
    Place<T> places[2];
    int turn = 0;
    locate(t, 0, t.range_begin * kRange, places[0]);
    for (int range = t.range_begin; range < t.range_end; ++range) {
        const int first = range * kRange;
        for (int head = 0; head < t.num_kv_heads; ++head, turn ^= 1) {
            Place<T>& ahead = places[turn ^ 1];
            const bool last_head = head + 1 == t.num_kv_heads;
            ahead.count = 0;
            if (!last_head) locate(t, head + 1, first, ahead);
            else if (range + 1 < t.range_end) locate(t, 0, first + kRange, ahead);
            else if (t.next) locate(*t.next, 0, t.next->range_begin * kRange, ahead);
            if (t.kv_type == KvType::I8) load_scales(t, head, first, s);
            attend_range(t, q, head, first, places[turn], &ahead, s);
        }
    }
}

// Through a float32 copy of each range, for blocks and heads that are no whole vectors.
template <class T>
static void attend_widened(const AttendTask& t, const float* const* q, const AttendState& s) {
    Place<float> place;
    for (int range = t.range_begin; range < t.range_end; ++range)
        for (int head = 0; head < t.num_kv_heads; ++head) {
            widen_range<T>(t, head, range * kRange, s, place);
            if (t.kv_type == KvType::I8) load_scales(t, head, range * kRange, s);
            attend_range<float>(t, q, head, range * kRange, place, nullptr, s);
        }
}

HR_INLINE void finish(float top, float total, const float* sum, int dim, const float* sink, float* out) {
    float a = 1.0f;
    if (sink) {
        const float higher = *sink > top ? *sink : top;
        a = exp1(top - higher);
        total = __builtin_fmaf(total, a, exp1(*sink - higher));
    }
    for (int d = 0; d < dim; d += N) {
        const int n = part(dim, d);
        store_part(out + d, div(mul(load_part(sum + d, n), bcast(a)), bcast(total)), n);
    }
}

static void attend(const AttendTask& t) {
    const int heads = t.group * t.num_kv_heads, pairs = t.num_rows * heads, padded = padded_dim(t.head_dim);
    const float* q[kMaxPairs];
    for (int p = 0; p < pairs; ++p) q[p] = t.q + (p / heads) * t.ldq + (p % heads) * t.head_dim;
    AttendState s;
    s.keys = t.scratch;
    s.values = s.keys + kRange * padded;
    s.sum = s.values + kRange * padded;
    s.top = s.sum + kMaxPairs * padded;
    s.total = s.top + kMaxPairs;
    s.key_scales = s.total + kMaxPairs;
    s.value_scales = s.key_scales + kRange;
    for (int p = 0; p < pairs; ++p) {
        s.top[p] = -__builtin_inff();
        s.total[p] = 0;
        for (int d = 0; d < padded; d += N) store(s.sum + p * padded + d, zero());
    }
    const bool whole = t.block_size % 16 == 0 && t.head_dim % 16 == 0;
    switch (t.kv_type) {
        case KvType::F32: whole ? attend_direct<float>(t, q, s) : attend_widened<float>(t, q, s); break;
        case KvType::F16: whole ? attend_direct<Half>(t, q, s) : attend_widened<Half>(t, q, s); break;
        default: whole ? attend_direct<int8_t>(t, q, s) : attend_widened<int8_t>(t, q, s);
    }
    if (t.partials) return;
    for (int p = 0; p < pairs; ++p) {
        const float* sink = t.sinks ? t.sinks + p % heads : nullptr;
        finish(s.top[p], s.total[p], s.sum + p * padded, t.head_dim, sink,
               t.out + (p / heads) * t.ldo + (p % heads) * t.head_dim);
    }
}

static void merge_partials(const float* partials, int num_ranges, int64_t range_stride, int head_dim, const float* sink,
                           float* out) {
    alignas(64) float sum[kMaxHeadDim];
    for (int d = 0; d < head_dim; ++d) sum[d] = 0;
    float top = -__builtin_inff(), total = 0;
    for (int r = 0; r < num_ranges; ++r) {
        const float* x = partials + r * range_stride;
        float a, b;
        fold_totals(1, x, x + 1, &top, &total, &a, &b);
        for (int d = 0; d < head_dim; d += N) {
            const int n = part(head_dim, d);
            const VF scaled = mul(load_part(x + 2 + d, n), bcast(b));
            store_part(sum + d, fma(load_part(sum + d, n), bcast(a), scaled), n);
        }
    }
    finish(top, total, sum, head_dim, sink, out);
}

}  // namespace headrace::HR_ISA
