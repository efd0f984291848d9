// Paged attention: some query rows of one request against one kv head, or one row against several, range by range.
//
// Pairs of row and query head go through a range in blocks of a few: dots, probabilities and values of a block stay in
// registers and L1. A block reads only keys that one of its rows sees. `M` is what is multiplied: see factors.h.
#pragma once

#include "factors.h"

namespace headrace::HR_ISA {

// Working memory of one task, carved from its scratch.
struct AttendState {
    float *keys, *values;  // a copied range: [head_dim][64], [64][padded]
    float* queries;        // rounded: [pairs][padded]
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
template <class M, class T, int pairs, int vectors>
HR_KERNEL void dot_tile(const typename M::Factor* const* q, int dim, const T* const* keys, int64_t stride,
                        const T* const* ahead, float* dots) {
    VF acc[pairs][vectors];
#pragma GCC unroll 8
    for (int p = 0; p < pairs; ++p)
        for (int v = 0; v < vectors; ++v) acc[p][v] = zero();
    for (int i = 0; i < dim; i += M::step) {
        const int d = M::at(i);
        typename M::Vector k[vectors];
        for (int v = 0; v < vectors; ++v) k[v] = M::keys(keys[v] + d * stride, stride);
        for (int at = i; ahead && at < i + M::step; ++at) {
            // A vector of float16 keys is half a cache line; its neighbour shares it in blocks of more than 16.
            constexpr int step = sizeof(T) * N < 64 ? 64 / (sizeof(T) * N) : 1;
            for (int v = 0; v < vectors; v += step) prefetch_far(ahead[v] + at * stride);
        }
#pragma GCC unroll 8
        for (int p = 0; p < pairs; ++p) {
            const auto qd = M::bcast(q[p] + d);
            for (int v = 0; v < vectors; ++v) acc[p][v] = M::multiply(qd, k[v], acc[p][v]);
        }
    }
#pragma GCC unroll 8
    for (int p = 0; p < pairs; ++p)
        for (int v = 0; v < vectors; ++v) store(dots + p * kRange + v * N, acc[p][v]);
}

// Tokens of a range that a row sees.
struct Span {
    int begin, end;
};

// A block of pairs of one range on its way to its sums.
template <class M>
struct Block {
    static_assert(kPairs <= N);
    alignas(64) float dots[kPairs * kRange];
    alignas(64) typename M::Factor weights[kPairs * kRange];  // p
    alignas(64) float top[N], total[N], old_part[N], new_part[N];  // what scores are taken from; l; a and b
    Span spans[kPairs], all;               // `all` is empty where nothing is visible
    float* out;  // rows of sums, or of what the range alone gives
    int64_t out_step;
    int out_dim;
    bool fold;  // into the sums
};

// o[pair][d..] = sum over tokens [begin, end) of p[pair][token] * value[token][d..], to its place.
template <class M, class T, int pairs, int vectors>
HR_KERNEL void value_tile(const Block<M>& block, const T* const* values, int d, int begin, int end,
                          const Place<T>* ahead) {
    VF acc[pairs][vectors];
#pragma GCC unroll 8
    for (int i = 0; i < pairs; ++i)
        for (int v = 0; v < vectors; ++v) acc[i][v] = zero();
    for (int i = begin; i < end; i += M::step) {
        const int j = M::at(i);
        typename M::Vector x[vectors];
        for (int v = 0; v < vectors; ++v) x[v] = M::values(values, j, d + v * N);
        for (int next = i; ahead && next < i + M::step && next < ahead->count; ++next)
            for (int at = 0; at < vectors * N; at += 64 / int(sizeof(T))) prefetch_far(ahead->values[next] + d + at);
#pragma GCC unroll 8
        for (int p = 0; p < pairs; ++p) {
            const auto w = M::bcast(block.weights + p * kRange + j);
            for (int v = 0; v < vectors; ++v) acc[p][v] = M::multiply(w, x[v], acc[p][v]);
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

// Blocks must be whole vectors. What nobody sees, and yet is read beside something visible, points at something visible: what
// that gives is masked.
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
    if (next_value % 2) place.values[next_value] = place.values[next_value - 1];
}

HR_INLINE float widen_one(const float* p) { return *p; }
HR_INLINE float widen_one(const int8_t* p) { return float(*p); }
HR_INLINE float widen_one(const Half* p) {
    alignas(64) uint16_t lanes[N] = {p->bits};
    alignas(64) float out[N];
    store(out, load_f16(lanes));
    return out[0];
}

// Copies a range to float scratch. Values are padded with zeros to a multiple of 16, keys to an even dimension.
template <class T>
static void widen_range(const AttendTask& t, int head, int first, const AttendState& s, Place<float>& place) {
    const int padded = padded_dim(t.head_dim), begin = begin_of(t, first);
    place.count = end_of(t, first);
    place.stride = kRange;
    for (int v = 0; v < kRange / N; ++v) place.keys[v] = s.keys + v * N;
    for (int j = 0; j < kRange; ++j) place.values[j] = s.values + j * padded;
    if (begin % 2) place.values[begin - 1] = place.values[begin];
    if (place.count % 2) place.values[place.count] = place.values[place.count - 1];
    if (t.head_dim % 2) {
        for (int j = 0; j < kRange; ++j) s.keys[t.head_dim * kRange + j] = 0;
    }
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

// Rounds what is visible of a range, as the products read it: keys [d][64], values [token][dim], step by step. Asks for
// `ahead`.
template <class T>
static void round_place(const AttendTask& t, int first, const Place<T>& from, const Place<T>& ahead, const AttendState& s,
                        Place<Rounded::Factor>& place) {
    constexpr int step = Rounded::step;
    auto *keys = (Rounded::Factor*)s.keys, *values = (Rounded::Factor*)s.values;
    place.count = from.count;
    place.stride = kRange;
    const int begin = begin_of(t, first);
    for (int v = 0; v < kRange / N; ++v) place.keys[v] = keys + v * N * step;
    for (int d = 0; d < t.head_dim; d += step)
        for (int v = begin / N; v * N < from.count; ++v)
            Rounded::store(keys + d * kRange + v * N * step, Rounded::keys(from.keys[v] + d * from.stride, from.stride));
    if (ahead.count) {
        for (int d = 0; d < t.head_dim; ++d)
            for (int v = 0; v < kRange / N; v += sizeof(T) * N < 64 ? 64 / (sizeof(T) * N) : 1)
                prefetch_far(ahead.keys[v] + d * ahead.stride);
    }
    for (int j = 0; j < ahead.count; ++j)
        for (int at = 0; at < t.head_dim; at += 64 / int(sizeof(T))) prefetch_far(ahead.values[j] + at);
    for (int j = begin / 2 * 2; j < from.count + from.count % 2; j += step) {
        place.values[j] = values + j * t.head_dim;
        for (int d = 0; d < t.head_dim; d += N)
            Rounded::store(values + j * t.head_dim + d * step, Rounded::values(from.values, j, d));
    }
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

HR_INLINE Span span_of(const AttendTask& t, int row, int first) {
    const int position = t.first_position + row, lo = first_visible(t, position) - first, hi = position + 1 - first;
    return {lo > 0 ? lo : 0, hi < kRange ? hi : kRange};
}

// What turns the numbers that `scores` leaves into scores: rounded ones are scaled where they are raised to powers.
template <class M>
HR_INLINE float scale_of(const AttendTask& t) {
    return M::rounded && !(t.softcap > 0) ? t.scale : 1.0f;
}

// Dots of one pair to scores in place, but for their scale and as far as they are visible; returns a vector with the greatest.
template <class M>
HR_INLINE VF scores(const AttendTask& t, float* dots, const Span& span, const AttendState& s) {
    const bool later = M::rounded && !(t.softcap > 0);
    const VF scale = bcast(t.scale), hidden = bcast(-__builtin_inff());
    VF best = hidden;
    if (span.begin == 0 && span.end == kRange && t.kv_type != KvType::I8 && !(t.softcap > 0)) {
        for (int v = 0; v < kRange / N; ++v) {
            VF x = load(dots + v * N);
            if (!later) store(dots + v * N, x = mul(x, scale));
            best = max(best, x);
        }
        return best;
    }
    const VF low = bcast(float(span.begin)), high = bcast(float(span.end));
    for (int v = 0; v < kRange / N; ++v) {
        VF x = load(dots + v * N);
        if (t.kv_type == KvType::I8) x = mul(x, load(s.key_scales + v * N));
        if (!later) x = mul(x, scale);
        if (t.softcap > 0) x = mul(bcast(t.softcap), tanh(div(x, bcast(t.softcap))));
        const VF index = add(to_float(iota()), bcast(float(v * N)));
        x = select_lt(index, low, hidden, x);
        x = select_lt(index, high, x, hidden);
        store(dots + v * N, x);
        best = max(best, x);
    }
    return best;
}

// Scores of one pair to what values are multiplied with; returns sixteen sums of probabilities.
HR_INLINE W16 probabilities(const AttendTask& t, const float* scores, float top, const AttendState& s, float* weights) {
    VF values[kRange / N];
    for (int v = 0; v < kRange / N; ++v) values[v] = exp_below(sub(load(scores + v * N), bcast(top)));
    W16 lanes;
    constexpr int step = 16 / N;
    for (int i = 0; i < step; ++i)
        lanes.v[i] = add(add(values[i], values[step + i]), add(values[2 * step + i], values[3 * step + i]));
    for (int v = 0; v < kRange / N; ++v) {
        if (t.kv_type == KvType::I8) values[v] = mul(values[v], load(s.value_scales + v * N));
        store(weights + v * N, values[v]);
    }
    return lanes;
}

HR_INLINE W16 probabilities(const AttendTask& t, const float* scores, float top, const AttendState& s,
                              Rounded::Factor* weights) {
    const VF scale = bcast(scale_of<Rounded>(t) * 1.44269504088896341f);
    VF values[kRange / N];
    for (int v = 0; v < kRange / N; ++v) values[v] = power_of_two(mul(sub(load(scores + v * N), bcast(top)), scale));
    const W16 sum = Rounded::round_range(values, weights);
    if (t.kv_type == KvType::I8) {
        for (int v = 0; v < kRange / N; ++v) values[v] = mul(values[v], load(s.value_scales + v * N));
        Rounded::round_range(values, weights);
    }
    return sum;
}

// M and L of some pairs, and what their old and their new sums are scaled with.
HR_INLINE void fold_totals(int pairs, VF m, VF l, float* top, float* total, VF& a, VF& b) {
    const VF before = load_part(top, pairs), higher = max(m, before);
    a = exp(sub(before, higher)), b = exp(sub(m, higher));
    store_part(total, fma(load_part(total, pairs), a, mul(l, b)), pairs);
    store_part(top, higher, pairs);
}

// Pairs of one kv head from p on and one range. Dots first.
template <class M, class T, int pairs>
static void make_dots(const AttendTask& t, const typename M::Factor* const* q, int p, int first, const Place<T>& here,
                      const Place<T>* ahead, Block<M>& block) {
    for (int i = 0, row = p / t.group, in_row = p % t.group; i < pairs; ++i) {
        block.spans[i] = span_of(t, row, first);
        if (++in_row == t.group) in_row = 0, ++row;
    }
    const int begin = block.spans[0].begin, end = block.spans[pairs - 1].end;
    block.all = {begin, end};
    if (begin >= end) return;
    const int dim = M::rounded ? t.head_dim + t.head_dim % 2 : t.head_dim;
    const auto clear = [&](int v) {
        for (int i = 0; i < pairs; ++i) store(block.dots + i * kRange + v * N, zero());
    };
    int v = begin / N;
    for (int skipped = 0; skipped < v; ++skipped) clear(skipped);
    while (v * N < end) {
        const T* const* next = ahead && ahead->count ? ahead->keys + v : nullptr;
        // A single vector for less than all: as good when there are pairs enough to hide the latency of sums.
        if (pairs >= 4 && (v + kVectors) * N >= end + N) {
            dot_tile<M, T, pairs, 1>(q + p, dim, here.keys + v, here.stride, next, block.dots + v * N);
            v += 1;
        } else {
            v = v / kVectors * kVectors;
            next = next ? ahead->keys + v : nullptr;
            dot_tile<M, T, pairs, kVectors>(q + p, dim, here.keys + v, here.stride, next, block.dots + v * N);
            v += kVectors;
        }
    }
    for (; v < kRange / N; ++v) clear(v);
}

// Then what values are multiplied with, and where their sums go; pairs of all heads count from `first_pair`.
template <class M, int pairs>
static void make_weights(const AttendTask& t, int p, int first_pair, int first, const AttendState& s, Block<M>& block) {
    if (block.all.begin >= block.all.end) return;
    VF best[pairs];
    for (int i = 0; i < pairs; ++i) best[i] = scores<M>(t, block.dots + i * kRange, block.spans[i], s);
    // Finite for those that see nothing, so that two of them differ by zero and not by a NaN.
    const VF least = bcast(-3e38f), top = max(least, reduce_max_rows(best));
    store(block.top, top);
    W16 sums[pairs];
    for (int i = 0; i < pairs; ++i)
        sums[i] = probabilities(t, block.dots + i * kRange, block.top[i], s, block.weights + i * kRange);
    const VF m = M::rounded ? max(least, mul(top, bcast(scale_of<M>(t)))) : top, l = reduce_add_rows(sums);
    store(block.total, l);
    p += first_pair;
    block.fold = !t.partials;
    if (t.partials) {
        block.out = t.partials + (first / kRange) * t.partial_stride + p * (t.head_dim + 2);
        block.out_step = t.head_dim + 2;
        block.out_dim = t.head_dim;
        store(block.top, m);
        for (int i = 0; i < pairs; ++i) {
            block.out[i * block.out_step] = block.top[i];
            block.out[i * block.out_step + 1] = block.total[i];
        }
        block.out += 2;
    } else {
        const int padded = padded_dim(t.head_dim);
        block.out = s.sum + p * padded;
        block.out_step = block.out_dim = padded;
        VF a, b;
        fold_totals(pairs, m, l, s.top + p, s.total + p, a, b);
        store(block.old_part, a);
        store(block.new_part, b);
    }
}

// Values last.
template <class M, class T, int pairs>
static void add_values(const AttendTask& t, const Place<T>& here, const Place<T>* ahead, const Block<M>& block) {
    auto [begin, end] = block.all;
    if (begin >= end) return;
    const int padded = padded_dim(t.head_dim);
    if (M::rounded) begin -= begin % 2, end += end % 2;
    int d = 0;
    for (; d + kVectors * N <= padded; d += kVectors * N)
        value_tile<M, T, pairs, kVectors>(block, here.values, d, begin, end, ahead);
    for (; d < padded; d += N) value_tile<M, T, pairs, 1>(block, here.values, d, begin, end, ahead);
    for (int j = end; ahead && j < ahead->count; ++j)
        for (int at = 0; at < t.head_dim; at += 64 / int(sizeof(T))) prefetch_far(ahead->values[j] + at);
}

template <int n>
struct Count {
    static constexpr int value = n;
};

template <class F>
HR_INLINE void with_count(int pairs, F&& call) {
    switch (pairs) {
        case 1: call(Count<1>{}); break;
        case 2: call(Count<2>{}); break;
        case 3: call(Count<3>{}); break;
        case 4: call(Count<4>{}); break;
        case 5: call(Count<5>{}); break;
        default: call(Count<kPairs>{});
    }
}

// All pairs of kv head `head` through one range. The dots of a block come before the values of the one before it: they keep the
// multipliers busy while its weights, one long chain, are made.
template <class M, class T>
static void attend_range(const AttendTask& t, const typename M::Factor* const* q, int head, int first, const Place<T>& here,
                         const Place<T>* ahead, const AttendState& s) {
    const int pairs = t.num_rows * t.group, first_pair = head * pairs;
    q += first_pair;
    Block<M> blocks[2];
    const auto add = [&](int p) {
        with_count(pairs - p, [&](auto count) {
            add_values<M, T, count.value>(t, here, p ? nullptr : ahead, blocks[p / kPairs % 2]);
        });
    };
    for (int p = 0; p < pairs; p += kPairs) {
        auto& block = blocks[p / kPairs % 2];
        with_count(pairs - p, [&](auto count) {
            make_dots<M, T, count.value>(t, q, p, first, here, p ? nullptr : ahead, block);
        });
        if (p) add(p - kPairs);
        with_count(pairs - p, [&](auto count) { make_weights<M, count.value>(t, p, first_pair, first, s, block); });
    }
    add((pairs - 1) / kPairs * kPairs);
}

// Straight from the blocks: the vector units widen beside the sums at no cost. Heads follow each other within a range, as
// they lie in the blocks. Many pairs share the rounding.
template <class M, class T>
static void attend_direct(const AttendTask& t, const typename M::Factor* const* q, const AttendState& s) {
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
            if constexpr (M::rounded) {
                if (t.num_rows * t.group > kPairs) {
                    Place<typename M::Factor> rounded;
                    round_place(t, first, places[turn], ahead, s, rounded);
                    attend_range<M, typename M::Factor>(t, q, head, first, rounded, nullptr, s);
                    continue;
                }
            }
            attend_range<M, T>(t, q, head, first, places[turn], &ahead, s);
        }
    }
}

// Through a float32 copy of each range, for blocks and heads that are no whole vectors.
template <class M, class T>
static void attend_widened(const AttendTask& t, const typename M::Factor* const* q, const AttendState& s) {
    Place<float> place;
    for (int range = t.range_begin; range < t.range_end; ++range)
        for (int head = 0; head < t.num_kv_heads; ++head) {
            widen_range<T>(t, head, range * kRange, s, place);
            if (t.kv_type == KvType::I8) load_scales(t, head, range * kRange, s);
            attend_range<M, float>(t, q, head, range * kRange, place, nullptr, s);
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

template <class M>
HR_KERNEL void attend_with(const AttendTask& t) {
    const int heads = t.group * t.num_kv_heads, pairs = t.num_rows * heads, padded = padded_dim(t.head_dim);
    AttendState s;
    s.keys = t.scratch;
    s.values = s.keys + kRange * padded;
    s.sum = s.values + kRange * padded;
    s.top = s.sum + kMaxPairs * padded;
    s.total = s.top + kMaxPairs;
    s.key_scales = s.total + kMaxPairs;
    s.value_scales = s.key_scales + kRange;
    s.queries = s.value_scales + kRange;
    const typename M::Factor* q[kMaxPairs];
    for (int p = 0; p < pairs; ++p) {
        const float* query = t.q + (p / heads) * t.ldq + (p % heads) * t.head_dim;
        if constexpr (M::rounded) {
            auto* rounded = (typename M::Factor*)s.queries + p * padded;
            if (t.head_dim % 2) rounded[t.head_dim] = {};
            M::round(query, t.head_dim, rounded);
            q[p] = rounded;
        } else q[p] = query;
        s.top[p] = -__builtin_inff();
        s.total[p] = 0;
        for (int d = 0; d < padded; d += N) store(s.sum + p * padded + d, zero());
    }
    const bool whole = t.block_size % 16 == 0 && t.head_dim % 16 == 0;
    switch (t.kv_type) {
        case KvType::F32: whole ? attend_direct<M, float>(t, q, s) : attend_widened<M, float>(t, q, s); break;
        case KvType::F16: whole ? attend_direct<M, Half>(t, q, s) : attend_widened<M, Half>(t, q, s); break;
        default: whole ? attend_direct<M, int8_t>(t, q, s) : attend_widened<M, int8_t>(t, q, s);
    }
    if (t.partials) return;
    for (int p = 0; p < pairs; ++p) {
        const float* sink = t.sinks ? t.sinks + p % heads : nullptr;
        finish(s.top[p], s.total[p], s.sum + p * padded, t.head_dim, sink,
               t.out + (p / heads) * t.ldo + (p % heads) * t.head_dim);
    }
}

static void attend(const AttendTask& t) {
    if (t.exact) return attend_with<Exact>(t);
    const NoSubnormals mode;
    attend_with<Rounded>(t);
}

HR_KERNEL void merge_ranges(const float* partials, int num_ranges, int64_t range_stride, int head_dim, const float* sink,
                            float* out) {
    alignas(64) float sum[kMaxHeadDim];
    for (int d = 0; d < head_dim; ++d) sum[d] = 0;
    float top = -__builtin_inff(), total = 0;
    for (int r = 0; r < num_ranges; ++r) {
        const float* x = partials + r * range_stride;
        VF a, b;
        fold_totals(1, load_part(x, 1), load_part(x + 1, 1), &top, &total, a, b);
        const float old_part = first_of(a), new_part = first_of(b);
        for (int d = 0; d < head_dim; d += N) {
            const int n = part(head_dim, d);
            const VF scaled = mul(load_part(x + 2 + d, n), bcast(new_part));
            store_part(sum + d, fma(load_part(sum + d, n), bcast(old_part), scaled), n);
        }
    }
    finish(top, total, sum, head_dim, sink, out);
}

static void merge_partials(bool exact, const float* partials, int num_ranges, int64_t range_stride, int head_dim,
                           const float* sink, float* out) {
    if (exact) return merge_ranges(partials, num_ranges, range_stride, head_dim, sink, out);
    const NoSubnormals mode;
    merge_ranges(partials, num_ranges, range_stride, head_dim, sink, out);
}

}  // namespace headrace::HR_ISA
