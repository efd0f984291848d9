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
    float *key_scales, *value_scales;
    bool* started;
};

// dots[pair][64] += q . k over tokens of `vectors` vectors; keys[v] points at d = 0.
template <class T, int pairs, int vectors>
HR_KERNEL void dot_tile(const float* const* q, int dim, const T* const* keys, int64_t stride, float* dots) {
    VF acc[pairs][vectors];
    for (int p = 0; p < pairs; ++p)
        for (int v = 0; v < vectors; ++v) acc[p][v] = zero();
    for (int d = 0; d < dim; ++d) {
        VF k[vectors];
        for (int v = 0; v < vectors; ++v) k[v] = load_weight(keys[v] + d * stride);
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
HR_KERNEL void value_tile(const float* p, const T* const* values, int d, int count, float* out, int padded) {
    VF acc[pairs][vectors];
    for (int i = 0; i < pairs; ++i)
        for (int v = 0; v < vectors; ++v) acc[i][v] = zero();
    for (int j = 0; j < count; ++j) {
        VF x[vectors];
        for (int v = 0; v < vectors; ++v) x[v] = load_weight(values[j] + d + v * N);
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
HR_INLINE void dots_of(const float* const* q, int dim, const T* const* keys, int64_t stride, int count, float* dots) {
    for (int v = 0; v * N < count; v += kVectors) dot_tile<T, pairs, kVectors>(q, dim, keys + v, stride, dots + v * N);
}

template <class T>
static void all_dots(const float* const* q, int pairs, int dim, const T* const* keys, int64_t stride, int count, float* dots) {
    while (pairs > 0) {
        const int n = pairs < kPairs ? pairs : kPairs;
        switch (n) {
            case 1: dots_of<T, 1>(q, dim, keys, stride, count, dots); break;
            case 2: dots_of<T, 2>(q, dim, keys, stride, count, dots); break;
            case 3: dots_of<T, 3>(q, dim, keys, stride, count, dots); break;
            default:
                if constexpr (kPairs > 3) {
                    if (n == 4) dots_of<T, 4>(q, dim, keys, stride, count, dots);
                    else if (n == 5) dots_of<T, 5>(q, dim, keys, stride, count, dots);
                    else dots_of<T, 6>(q, dim, keys, stride, count, dots);
                }
        }
        pairs -= n;
        q += n;
        dots += n * kRange;
    }
}

template <class T, int pairs>
HR_INLINE void values_of(const float* p, const T* const* values, int dim, int count, float* out, int padded) {
    int d = 0;
    for (; d + kVectors * N <= dim; d += kVectors * N) value_tile<T, pairs, kVectors>(p, values, d, count, out, padded);
    for (; d < dim; d += N) value_tile<T, pairs, 1>(p, values, d, count, out, padded);
}

template <class T>
static void all_values(const float* p, int pairs, const T* const* values, int dim, int count, float* out, int padded) {
    while (pairs > 0) {
        const int n = pairs < kPairs ? pairs : kPairs;
        switch (n) {
            case 1: values_of<T, 1>(p, values, dim, count, out, padded); break;
            case 2: values_of<T, 2>(p, values, dim, count, out, padded); break;
            case 3: values_of<T, 3>(p, values, dim, count, out, padded); break;
            default:
                if constexpr (kPairs > 3) {
                    if (n == 4) values_of<T, 4>(p, values, dim, count, out, padded);
                    else if (n == 5) values_of<T, 5>(p, values, dim, count, out, padded);
                    else values_of<T, 6>(p, values, dim, count, out, padded);
                }
        }
        pairs -= n;
        p += n * kRange;
        out += n * padded;
    }
}

HR_INLINE int64_t key_at(const AttendTask& t, int token) {
    const int64_t block = t.blocks[token / t.block_size];
    return block * t.key_stride + int64_t(t.kv_head) * t.head_dim * t.block_size + token % t.block_size;
}

HR_INLINE int64_t value_at(const AttendTask& t, int token) {
    const int64_t block = t.blocks[token / t.block_size];
    return block * t.value_stride + (int64_t(t.kv_head) * t.block_size + token % t.block_size) * t.head_dim;
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
static void widen_range(const AttendTask& t, int first, int count, const AttendState& s) {
    const T* keys = (const T*)t.key;
    const T* values = (const T*)t.value;
    const int padded = padded_dim(t.head_dim);
    const bool whole = t.block_size % 16 == 0;
    for (int j = 0; j < count; j += whole ? N : 1) {
        const T* k = keys + key_at(t, first + j);
        for (int d = 0; d < t.head_dim; ++d, k += t.block_size) {
            if (whole) store(s.keys + d * kRange + j, load_weight(k));
            else s.keys[d * kRange + j] = widen_one(k);
        }
    }
    for (int j = 0; j < count; ++j) {
        const T* v = values + value_at(t, first + j);
        float* out = s.values + j * padded;
        int d = 0;
        for (; d + N <= t.head_dim; d += N) store(out + d, load_weight(v + d));
        for (; d < t.head_dim; ++d) out[d] = widen_one(v + d);
        for (; d < padded; ++d) out[d] = 0;
    }
}

static void load_scales(const AttendTask& t, int first, int count, const AttendState& s) {
    for (int j = 0; j < kRange; ++j) s.key_scales[j] = s.value_scales[j] = 0;
    for (int j = 0; j < count; ++j) {
        const int64_t block = t.blocks[(first + j) / t.block_size];
        const float* scales = t.scales + block * t.scale_stride + int64_t(t.kv_head) * 2 * t.block_size;
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
    VF best = hidden;
    for (int v = 0; v < kRange / N; ++v) {
        VF x = load(dots + v * N);
        if (t.kv_type == KvType::I8) x = mul(x, load(s.key_scales + v * N));
        x = mul(x, bcast(t.scale));
        if (t.softcap > 0) x = mul(bcast(t.softcap), tanh(div(x, bcast(t.softcap))));
        const VF index = add(to_float(iota()), bcast(float(v * N)));
        x = select_lt(index, low, hidden, x);
        x = select_lt(index, high, x, hidden);
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

// Folds (m, l, o) into (top, total, sum).
HR_INLINE void merge(float m, float l, const float* o, int dim, bool started, float& top, float& total, float* sum) {
    if (!started) {
        top = m;
        total = l;
        for (int d = 0; d < dim; d += N) store_part(sum + d, load_part(o + d, part(dim, d)), part(dim, d));
        return;
    }
    const float higher = m > top ? m : top;
    const float a = exp1(top - higher), b = exp1(m - higher);
    total = __builtin_fmaf(total, a, l * b);
    top = higher;
    for (int d = 0; d < dim; d += N) {
        const int n = part(dim, d);
        const VF scaled = mul(load_part(o + d, n), bcast(b));
        store_part(sum + d, fma(load_part(sum + d, n), bcast(a), scaled), n);
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
static void range_of(const AttendTask& t, int first, int count, const float* const* q, const AttendState& s, bool direct) {
    const int pairs = t.num_rows * t.group, dim = t.head_dim, padded = padded_dim(dim);
    // What no row of the task sees is not even read: it may be another request's.
    const int oldest = first_visible(t, t.first_position) - first, begin = oldest > 0 ? oldest : 0;
    // Unused vectors point at the first one: what they give is never visible.
    if (direct) {
        const T* keys[kRange / N];
        for (int v = 0; v < kRange / N; ++v) keys[v] = (const T*)t.key + key_at(t, first + (v * N < count ? v * N : 0));
        all_dots(q, pairs, dim, keys, t.block_size, count, s.scores);
    } else {
        widen_range<T>(t, first, count, s);
        const float* keys[kRange / N];
        for (int v = 0; v < kRange / N; ++v) keys[v] = s.keys + v * N;
        all_dots(q, pairs, dim, keys, kRange, count, s.scores);
    }
    if (t.kv_type == KvType::I8) load_scales(t, first, count, s);
    float tops[kMaxPairs], totals[kMaxPairs];
    bool visible[kMaxPairs];
    for (int p = 0; p < pairs; ++p) {
        const int position = t.first_position + p / t.group;
        const int lo = first_visible(t, position) - first, hi = position + 1 - first;
        visible[p] = hi > 0 && lo < kRange && lo < hi;
        float* dots = s.scores + p * kRange;
        if (visible[p]) totals[p] = probabilities(t, dots, lo, hi, s, tops[p]);
        else for (int j = 0; j < kRange; ++j) dots[j] = 0;
    }
    const T* direct_values[kRange];
    const float* widened_values[kRange];
    if (direct) {
        for (int j = begin; j < count; ++j) direct_values[j - begin] = (const T*)t.value + value_at(t, first + j);
        all_values(s.scores + begin, pairs, direct_values, dim, count - begin, s.range_sum, padded);
    } else {
        for (int j = begin; j < count; ++j) widened_values[j - begin] = s.values + j * padded;
        all_values(s.scores + begin, pairs, widened_values, padded, count - begin, s.range_sum, padded);
    }
    for (int p = 0; p < pairs; ++p) {
        if (!visible[p]) continue;
        const float* o = s.range_sum + p * padded;
        if (t.partials) {
            float* out = t.partials + (first / kRange) * t.partial_stride + p * (dim + 2);
            out[0] = tops[p];
            out[1] = totals[p];
            copy(o, out + 2, dim);
        } else {
            merge(tops[p], totals[p], o, dim, s.started[p], s.top[p], s.total[p], s.sum + p * padded);
            s.started[p] = true;
        }
    }
}

static void attend(const AttendTask& t) {
    const int pairs = t.num_rows * t.group, padded = padded_dim(t.head_dim);
    bool started[kMaxPairs] = {};
    const float* q[kMaxPairs];
    for (int p = 0; p < pairs; ++p) q[p] = t.q + (p / t.group) * t.ldq + (p % t.group) * t.head_dim;
    AttendState s;
    s.keys = t.scratch;
    s.values = s.keys + kRange * padded;
    s.scores = s.values + kRange * padded;
    s.sum = s.scores + kMaxPairs * kRange;
    s.range_sum = s.sum + kMaxPairs * padded;
    s.top = s.range_sum + kMaxPairs * padded;
    s.total = s.top + kMaxPairs;
    s.key_scales = s.total + kMaxPairs;
    s.value_scales = s.key_scales + kRange;
    s.started = started;
    const int last = t.first_position + t.num_rows - 1;
    const bool direct = t.kv_type != KvType::I8 && t.block_size % 16 == 0 && t.head_dim % 16 == 0 &&
                        (t.kv_type == KvType::F32 || pairs <= 8);
    for (int range = t.range_begin; range < t.range_end; ++range) {
        const int first = range * kRange;
        const int count = last + 1 - first < kRange ? last + 1 - first : kRange;
        if (count <= 0 || first_visible(t, t.first_position) >= first + kRange) continue;
        if (t.kv_type == KvType::F32) range_of<float>(t, first, count, q, s, direct);
        else if (t.kv_type == KvType::F16) range_of<Half>(t, first, count, q, s, direct);
        else range_of<int8_t>(t, first, count, q, s, false);
    }
    if (t.partials) return;
    for (int p = 0; p < pairs; ++p) {
        const float* sink = t.sinks ? t.sinks + p % t.group : nullptr;
        finish(s.top[p], s.total[p], s.sum + p * padded, t.head_dim, sink,
               t.out + (p / t.group) * t.ldo + (p % t.group) * t.head_dim);
    }
}

static void merge_partials(const float* partials, int num_ranges, int64_t range_stride, int head_dim, const float* sink,
                           float* out) {
    alignas(64) float sum[kMaxHeadDim];
    float top = 0, total = 0;
    for (int r = 0; r < num_ranges; ++r) {
        const float* x = partials + r * range_stride;
        merge(x[0], x[1], x + 2, head_dim, r > 0, top, total, sum);
    }
    finish(top, total, sum, head_dim, sink, out);
}

}  // namespace headrace::HR_ISA
