// Paged attention: some query rows of one request against one kv head, range by range.
#pragma once

#include "rows.h"

namespace headrace::HR_ISA {

// Working memory of one task, carved from its scratch.
struct AttendState {
    float *keys, *values;        // a widened range: [head_dim][64], [64][padded]
    float *scores;               // [pairs][64]
    float *sum, *range_sum;      // O and o: [pairs][padded]
    float *top, *total;          // M and L
    float *range_top, *range_total;  // m and l
    float *key_scales, *value_scales;
};

// Where the next range lies, to be fetched while this one is computed; null pointers fetch nothing.
template <class T>
struct Ahead {
    const T* keys[kRange / N];
    const T* values[kRange];
    int count;  // tokens; 0 when there is no next range
};

// dots[pair][64] += q . k over tokens of `vectors` vectors; keys[v] points at d = 0.
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

// out[pair][d..] = sum over tokens of p[pair][token] * value[token][d..]
template <class T, int pairs, int vectors>
HR_KERNEL void value_tile(const float* p, const T* const* values, int d, int count, const T* const* ahead, int num_ahead,
                          float* out, int padded) {
    VF acc[pairs][vectors];
    for (int i = 0; i < pairs; ++i)
        for (int v = 0; v < vectors; ++v) acc[i][v] = zero();
    for (int j = 0; j < count; ++j) {
        VF x[vectors];
        for (int v = 0; v < vectors; ++v) x[v] = load_weight(values[j] + d + v * N);
        if (j < num_ahead)
            for (int at = 0; at < vectors * N; at += 64 / int(sizeof(T))) prefetch_far(ahead[j] + d + at);
#pragma GCC unroll 8
        for (int i = 0; i < pairs; ++i) {
            const VF w = bcast(p[i * kRange + j]);
            for (int v = 0; v < vectors; ++v) acc[i][v] = fma(w, x[v], acc[i][v]);
        }
    }
    for (int i = 0; i < pairs; ++i)
        for (int v = 0; v < vectors; ++v) store(out + i * padded + d + v * N, acc[i][v]);
}

constexpr int kPairs = kManyRegisters ? 6 : 3;
constexpr int kVectors = 4;

template <class T, int pairs>
HR_INLINE void dots_of(const float* const* q, int dim, const T* const* keys, int64_t stride, int count,
                       const T* const* ahead, float* dots) {
    for (int v = 0; v * N < count; v += kVectors)
        dot_tile<T, pairs, kVectors>(q, dim, keys + v, stride, ahead ? ahead + v : nullptr, dots + v * N);
}

template <class T>
static void all_dots(const float* const* q, int pairs, int dim, const T* const* keys, int64_t stride, int count,
                     const T* const* ahead, float* dots) {
    while (pairs > 0) {
        const int n = pairs < kPairs ? pairs : kPairs;
        switch (n) {
            case 1: dots_of<T, 1>(q, dim, keys, stride, count, ahead, dots); break;
            case 2: dots_of<T, 2>(q, dim, keys, stride, count, ahead, dots); break;
            case 3: dots_of<T, 3>(q, dim, keys, stride, count, ahead, dots); break;
            default:
                if constexpr (kPairs > 3) {
                    if (n == 4) dots_of<T, 4>(q, dim, keys, stride, count, ahead, dots);
                    else if (n == 5) dots_of<T, 5>(q, dim, keys, stride, count, ahead, dots);
                    else dots_of<T, 6>(q, dim, keys, stride, count, ahead, dots);
                }
        }
        pairs -= n;
        q += n;
        dots += n * kRange;
        ahead = nullptr;
    }
}

template <class T, int pairs>
HR_INLINE void values_of(const float* p, const T* const* values, int dim, int count, const T* const* ahead, int num_ahead,
                         float* out, int padded) {
    int d = 0;
    for (; d + kVectors * N <= dim; d += kVectors * N) value_tile<T, pairs, kVectors>(p, values, d, count, ahead, num_ahead, out, padded);
    for (; d < dim; d += N) value_tile<T, pairs, 1>(p, values, d, count, ahead, num_ahead, out, padded);
}

template <class T>
static void all_values(const float* p, int pairs, const T* const* values, int dim, int count, const T* const* ahead,
                       int num_ahead, float* out, int padded) {
    while (pairs > 0) {
        const int n = pairs < kPairs ? pairs : kPairs;
        switch (n) {
            case 1: values_of<T, 1>(p, values, dim, count, ahead, num_ahead, out, padded); break;
            case 2: values_of<T, 2>(p, values, dim, count, ahead, num_ahead, out, padded); break;
            case 3: values_of<T, 3>(p, values, dim, count, ahead, num_ahead, out, padded); break;
            default:
                if constexpr (kPairs > 3) {
                    if (n == 4) values_of<T, 4>(p, values, dim, count, ahead, num_ahead, out, padded);
                    else if (n == 5) values_of<T, 5>(p, values, dim, count, ahead, num_ahead, out, padded);
                    else values_of<T, 6>(p, values, dim, count, ahead, num_ahead, out, padded);
                }
        }
        pairs -= n;
        p += n * kRange;
        out += n * padded;
        num_ahead = 0;
    }
}

HR_INLINE int64_t key_at(const AttendTask& t, int head, int token) {
    const int64_t block = t.blocks[token / t.block_size];
    return block * t.key_stride + int64_t(t.kv_head + head) * t.head_dim * t.block_size + token % t.block_size;
}

HR_INLINE int64_t value_at(const AttendTask& t, int head, int token) {
    const int64_t block = t.blocks[token / t.block_size];
    return block * t.value_stride + (int64_t(t.kv_head + head) * t.block_size + token % t.block_size) * t.head_dim;
}

HR_INLINE float widen_one(const float* p) { return *p; }
HR_INLINE float widen_one(const int8_t* p) { return float(*p); }
HR_INLINE float widen_one(const Half* p) {
    alignas(64) uint16_t lanes[N] = {p->bits};
    alignas(64) float out[N];
    store(out, load_f16(lanes));
    return out[0];
}

// Copies a range to float scratch; values are padded with zeros to a multiple of 16.
template <class T>
static void widen_range(const AttendTask& t, int head, int first, int count, const AttendState& s) {
    const T* keys = (const T*)t.key;
    const T* values = (const T*)t.value;
    const int padded = padded_dim(t.head_dim);
    const bool whole = t.block_size % 16 == 0;
    for (int j = 0; j < count; j += whole ? N : 1) {
        const T* k = keys + key_at(t, head, first + j);
        for (int d = 0; d < t.head_dim; ++d, k += t.block_size) {
            if (whole) store(s.keys + d * kRange + j, load_weight(k));
            else s.keys[d * kRange + j] = widen_one(k);
        }
    }
    for (int j = 0; j < count; ++j) {
        const T* v = values + value_at(t, head, first + j);
        float* out = s.values + j * padded;
        int d = 0;
        for (; d + N <= t.head_dim; d += N) store(out + d, load_weight(v + d));
        for (; d < t.head_dim; ++d) out[d] = widen_one(v + d);
        for (; d < padded; ++d) out[d] = 0;
    }
}

static void load_scales(const AttendTask& t, int head, int first, int count, const AttendState& s) {
    for (int j = 0; j < kRange; ++j) s.key_scales[j] = s.value_scales[j] = 0;
    for (int j = 0; j < count; ++j) {
        const int64_t block = t.blocks[(first + j) / t.block_size];
        const float* scales = t.scales + block * t.scale_stride + int64_t(t.kv_head + head) * 2 * t.block_size;
        s.key_scales[j] = scales[(first + j) % t.block_size];
        s.value_scales[j] = scales[t.block_size + (first + j) % t.block_size];
    }
}

HR_INLINE int first_visible(const AttendTask& t, int position) {
    int lo = 0;
    if (t.window > 0 && position - t.window + 1 > lo) lo = position - t.window + 1;
    if (t.chunk > 0 && position / t.chunk * t.chunk > lo) lo = position / t.chunk * t.chunk;
    return lo;
}

// Dots of one pair to probabilities in place; returns the sum, sets the maximum.
static float probabilities(const AttendTask& t, float* dots, int lo, int hi, const AttendState& s, float& top) {
    VF values[kRange / N];
    const VF low = bcast(float(lo)), high = bcast(float(hi)), hidden = bcast(-__builtin_inff());
    const bool masked = lo > 0 || hi < kRange;
    VF best = hidden;
    for (int v = 0; v < kRange / N; ++v) {
        VF x = load(dots + v * N);
        if (t.kv_type == KvType::I8) x = mul(x, load(s.key_scales + v * N));
        x = mul(x, bcast(t.scale));
        if (t.softcap > 0) x = mul(bcast(t.softcap), tanh(div(x, bcast(t.softcap))));
        if (masked) {
            const VF index = add(to_float(iota()), bcast(float(v * N)));
            x = select_lt(index, low, hidden, x);
            x = select_lt(index, high, x, hidden);
        }
        values[v] = x;
        best = max(best, x);
    }
    top = reduce_max(best);
    W16 lanes;
    for (int v = 0; v < kRange / N; ++v) values[v] = exp(sub(values[v], bcast(top)));
    constexpr int step = 16 / N;
    for (int i = 0; i < step; ++i)
        lanes.v[i] = add(add(values[i], values[step + i]), add(values[2 * step + i], values[3 * step + i]));
    for (int v = 0; v < kRange / N; ++v) {
        if (t.kv_type == KvType::I8) values[v] = mul(values[v], load(s.value_scales + v * N));
        store(dots + v * N, values[v]);
    }
    return reduce_add(lanes);
}

// Folds each pair's (m, l, o) into (M, L, O).
static void merge(int pairs, int dim, const float* m, const float* l, const float* o, int64_t o_step, float* top,
                  float* total, float* sum, int sum_step) {
    alignas(64) float a[kMaxPairs + N], b[kMaxPairs + N];
    for (int p = 0; p < pairs; p += N) {
        const int n = part(pairs, p);
        const VF mp = load_part(m + p, n), tp = load_part(top + p, n), higher = max(mp, tp);
        const VF ap = exp(sub(tp, higher)), bp = exp(sub(mp, higher));
        store_part(total + p, fma(load_part(total + p, n), ap, mul(load_part(l + p, n), bp)), n);
        store_part(top + p, higher, n);
        store(a + p, ap);
        store(b + p, bp);
    }
    for (int p = 0; p < pairs; ++p, o += o_step, sum += sum_step) {
        if (l[p] == 0) continue;  // nothing of the range is visible
        for (int d = 0; d < dim; d += N) {
            const int n = part(dim, d);
            const VF scaled = mul(load_part(o + d, n), bcast(b[p]));
            store_part(sum + d, fma(load_part(sum + d, n), bcast(a[p]), scaled), n);
        }
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

template <class T>
HR_INLINE void locate(const AttendTask& t, int head, int first, int count, Ahead<T>& a) {
    a.count = count;
    // Unused vectors point at the first one: what they give is never visible.
    for (int v = 0; v < kRange / N; ++v)
        a.keys[v] = (const T*)t.key + key_at(t, head, first + (v * N < count ? v * N : 0));
    for (int j = 0; j < count; ++j) a.values[j] = (const T*)t.value + value_at(t, head, first + j);
}

// Scores of a range to probabilities, for the pairs of one kv head. A pair that sees nothing of it gets zeros.
static void all_probabilities(const AttendTask& t, int head, int first, const AttendState& s) {
    const int pairs = t.num_rows * t.group;
    for (int i = 0, p = head * pairs; i < pairs; ++i, ++p) {
        const int position = t.first_position + i / t.group;
        const int lo = first_visible(t, position) - first, hi = position + 1 - first;
        float* dots = s.scores + p * kRange;
        if (hi > 0 && lo < kRange && lo < hi) {
            s.range_total[p] = probabilities(t, dots, lo, hi, s, s.range_top[p]);
        } else {
            for (int j = 0; j < kRange; ++j) dots[j] = 0;
            s.range_total[p] = 0;
            s.range_top[p] = -3e38f;  // finite, so that two of them differ by zero and not by a NaN
        }
    }
}

HR_INLINE int all_pairs(const AttendTask& t) { return t.num_rows * t.group * t.num_kv_heads; }

static void fold_range(const AttendTask& t, int first, const AttendState& s) {
    const int pairs = all_pairs(t), dim = t.head_dim, padded = padded_dim(dim);
    if (!t.partials) {
        merge(pairs, dim, s.range_top, s.range_total, s.range_sum, padded, s.top, s.total, s.sum, padded);
        return;
    }
    float* out = t.partials + (first / kRange) * t.partial_stride;
    for (int p = 0; p < pairs; ++p, out += dim + 2) {
        out[0] = s.range_top[p];
        out[1] = s.range_total[p];
        copy(s.range_sum + p * padded, out + 2, dim);
    }
}

HR_INLINE int range_count(const AttendTask& t, int first) {
    const int rest = t.first_position + t.num_rows - first;
    return rest < 0 ? 0 : rest < kRange ? rest : kRange;
}

// Straight from the blocks: for few pairs, or when nothing has to be widened. Heads follow each other within a range, as they
// lie in the blocks.
template <class T>
static void attend_direct(const AttendTask& t, const float* const* q, const AttendState& s) {
    const int pairs = t.num_rows * t.group, dim = t.head_dim, padded = padded_dim(dim);
    Ahead<T> places[2];
    int turn = 0;
    locate(t, 0, t.range_begin * kRange, range_count(t, t.range_begin * kRange), places[0]);
    for (int range = t.range_begin; range < t.range_end; ++range) {
        const int first = range * kRange;
        // What no row of the task sees is not even read: it may be another request's.
        const int oldest = first_visible(t, t.first_position) - first, begin = oldest > 0 ? oldest : 0;
        for (int head = 0; head < t.num_kv_heads; ++head, turn ^= 1) {
            const Ahead<T>& here = places[turn];
            Ahead<T>& ahead = places[turn ^ 1];
            const bool last_head = head + 1 == t.num_kv_heads;
            const int next = last_head ? first + kRange : first;
            ahead.count = 0;
            if (!last_head || range + 1 < t.range_end)
                locate(t, last_head ? 0 : head + 1, next, range_count(t, next), ahead);
            float* scores = s.scores + head * pairs * kRange;
            all_dots(q + head * pairs, pairs, dim, here.keys, t.block_size, here.count,
                     ahead.count ? ahead.keys : nullptr, scores);
            all_probabilities(t, head, first, s);
            all_values(scores + begin, pairs, here.values + begin, dim, here.count - begin, ahead.values, ahead.count,
                       s.range_sum + head * pairs * padded, padded);
        }
        fold_range(t, first, s);
    }
}

// Through a float32 copy of each range: any block size and head size, and cheaper when many pairs share it.
template <class T>
static void attend_widened(const AttendTask& t, const float* const* q, const AttendState& s) {
    const int pairs = t.num_rows * t.group, dim = t.head_dim, padded = padded_dim(dim);
    const float* keys[kRange / N];
    const float* values[kRange];
    for (int v = 0; v < kRange / N; ++v) keys[v] = s.keys + v * N;
    for (int j = 0; j < kRange; ++j) values[j] = s.values + j * padded;
    for (int range = t.range_begin; range < t.range_end; ++range) {
        const int first = range * kRange, count = range_count(t, first);
        const int oldest = first_visible(t, t.first_position) - first, begin = oldest > 0 ? oldest : 0;
        for (int head = 0; head < t.num_kv_heads; ++head) {
            widen_range<T>(t, head, first, count, s);
            if (t.kv_type == KvType::I8) load_scales(t, head, first, count, s);
            float* scores = s.scores + head * pairs * kRange;
            all_dots<float>(q + head * pairs, pairs, dim, keys, kRange, count, nullptr, scores);
            all_probabilities(t, head, first, s);
            all_values<float>(scores + begin, pairs, values + begin, padded, count - begin, nullptr, 0,
                              s.range_sum + head * pairs * padded, padded);
        }
        fold_range(t, first, s);
    }
}

static void attend(const AttendTask& t) {
    const int pairs = all_pairs(t), padded = padded_dim(t.head_dim), heads = pairs / t.num_rows;
    const float* q[kMaxPairs];
    for (int p = 0; p < pairs; ++p) q[p] = t.q + (p / heads) * t.ldq + (p % heads) * t.head_dim;
    AttendState s;
    s.keys = t.scratch;
    s.values = s.keys + kRange * padded;
    s.scores = s.values + kRange * padded;
    s.sum = s.scores + kMaxPairs * kRange;
    s.range_sum = s.sum + kMaxPairs * padded;
    s.top = s.range_sum + kMaxPairs * padded;
    s.total = s.top + kMaxPairs;
    s.range_top = s.total + kMaxPairs;
    s.range_total = s.range_top + kMaxPairs;
    s.key_scales = s.range_total + kMaxPairs;
    s.value_scales = s.key_scales + kRange;
    for (int p = 0; p < pairs; ++p) {
        s.top[p] = -__builtin_inff();
        s.total[p] = 0;
        for (int d = 0; d < padded; ++d) s.sum[p * padded + d] = 0;
    }
    const bool whole = t.block_size % 16 == 0 && t.head_dim % 16 == 0;
    if (t.kv_type == KvType::F32 && whole) attend_direct<float>(t, q, s);
    else if (t.kv_type == KvType::F32) attend_widened<float>(t, q, s);
    else if (t.kv_type == KvType::F16 && whole && t.num_rows * t.group <= 8) attend_direct<Half>(t, q, s);
    else if (t.kv_type == KvType::F16) attend_widened<Half>(t, q, s);
    else attend_widened<int8_t>(t, q, s);
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
        merge(1, head_dim, x, x + 1, x + 2, 0, &top, &total, sum, 0);
    }
    finish(top, total, sum, head_dim, sink, out);
}

}  // namespace headrace::HR_ISA
