// Work on single rows: norms, residual sums, gates, embedding rows, rotary embedding and the store to the cache, arg max.
#pragma once

#include "gemm_float.h"

namespace headrace::HR_ISA {

HR_INLINE float inverse_rms(const float* x, int n, float eps) {
    W16 lanes;
    for (auto& lane : lanes.v) lane = zero();
    for (int i = 0; i < n; i += 16)
        for (int v = 0; v < 16 / N; ++v) {
            const VF value = load_part(x + i + v * N, part(n, i + v * N));
            lanes.v[v] = fma(value, value, lanes.v[v]);
        }
    return 1.0f / __builtin_sqrtf(reduce_add(lanes) / float(n) + eps);
}

static void normalize(const float* x, const float* weight, float eps, int n, float* out) {
    const VF r = bcast(inverse_rms(x, n, eps));
    for (int i = 0; i < n; i += N) {
        const int count = part(n, i);
        store_part(out + i, mul(mul(load_part(x + i, count), r), load_part(weight + i, count)), count);
    }
}

static void add(const float* x, const float* y, float* out, int n) {
    for (int i = 0; i < n; i += N) {
        const int count = part(n, i);
        store_part(out + i, add(load_part(x + i, count), load_part(y + i, count)), count);
    }
}

static void rms_norm(const float* x, const float* residual, const float* weight, float eps, int n, float* out,
                     float* sum_out) {
    if (residual) {
        add(x, residual, sum_out, n);
        x = sum_out;
    }
    normalize(x, weight, eps, n, out);
}

static void scale_add(float weight, const float* x, float* acc, int n) {
    for (int i = 0; i < n; i += N) {
        const int count = part(n, i);
        store_part(acc + i, fma(bcast(weight), load_part(x + i, count), load_part(acc + i, count)), count);
    }
}

static void scale(float factor, float* x, int n) {
    for (int i = 0; i < n; i += N) {
        const int count = part(n, i);
        store_part(x + i, mul(load_part(x + i, count), bcast(factor)), count);
    }
}

static void gate(Activation activation, const float* gate, const float* up, float* out, int n) {
    for (int i = 0; i < n; i += N) {
        const int count = part(n, i);
        store_part(out + i, mul(activate(activation, load_part(gate + i, count)), load_part(up + i, count)), count);
    }
}

static void softmax(const float* x, int n, float* out) {
    float top = x[0];
    for (int i = 1; i < n; ++i) top = x[i] > top ? x[i] : top;
    W16 lanes;
    for (auto& lane : lanes.v) lane = zero();
    for (int i = 0; i < n; i += 16)
        for (int v = 0; v < 16 / N; ++v) {
            const int at = i + v * N, count = part(n, at);
            store_part(out + at, exp(sub(load_part(x + at, count), bcast(top))), count);
            lanes.v[v] = add(lanes.v[v], load_part(out + at, count));
        }
    const VF sum = bcast(reduce_add(lanes));
    for (int i = 0; i < n; i += N) {
        const int count = part(n, i);
        store_part(out + i, div(load_part(out + i, count), sum), count);
    }
}

static int arg_max(const float* x, int n) {
    VF top = bcast(-__builtin_inff());
    int i = 0;
    for (; i + N <= n; i += N) top = max(top, load(x + i));
    float best = reduce_max(top);
    for (; i < n; ++i) best = x[i] > best ? x[i] : best;
    for (int j = 0; j < n; ++j)
        if (x[j] == best) return j;
    return 0;
}

HR_INLINE uint32_t mix32(uint32_t h) {
    h = (h ^ (h >> 16)) * 0x85EBCA6B;
    h = (h ^ (h >> 13)) * 0xC2B2AE35;
    return h ^ (h >> 16);
}

// Plain loops over short blocks: the compiler makes vectors of them, and most blocks hold no contender. The noise is at most
// -log(v), v = 1 - u, and v at least a power of two that the exponent of ~hash tells.
static int find_contenders(const float* x, int n, uint32_t key_low, uint32_t key_high, float least, Contender* out) {
    constexpr int block = 32;
    uint32_t hash[block];
    int32_t may_win[block];
    float tail[block] = {};
    int found = 0;
    for (int first = 0; first < n; first += block) {
        const int count = n - first < block ? n - first : block;
        if (count < block) __builtin_memcpy(tail, x + first, size_t(count) * sizeof(float));
        const float* values = count < block ? tail : x + first;
        int32_t any = 0;
        for (int i = 0; i < block; ++i) {
            hash[i] = mix32(mix32(uint32_t(first + i) ^ key_low) ^ key_high);
            const int32_t exponent = (__builtin_bit_cast(int32_t, float(int32_t(~hash[i] >> 8))) >> 23) - 127;
            may_win[i] = values[i] + 0.6932f * float(24 - exponent) >= least;
            any |= may_win[i];
        }
        for (int i = 0; any && i < count; ++i) {
            out[found] = {first + i, hash[i]};
            found += may_win[i];
        }
    }
    return found;
}

static void embed(Format format, bool wide, int k, const uint8_t* panel, int lane, float factor, float* out) {
    alignas(64) float piece[kPiece * 16];
    for (int k0 = 0; k0 < k; k0 += kPiece) {
        const int count = k - k0 < kPiece ? k - k0 : kPiece;
        if (is_float(format)) {
            for (int i = 0; i < count; ++i) {
                const size_t at = size_t(k0 + i) * 16;
                VF row;
                if (format == Format::F32) row = load((const float*)panel + at + lane / N * N);
                else if (format == Format::F16) row = load_f16((const uint16_t*)panel + at + lane / N * N);
                else row = load_bf16((const uint16_t*)panel + at + lane / N * N);
                store(piece + i * 16 + lane / N * N, row);
            }
        } else {
            widen(format, wide, panel, k0, count, piece);
        }
        for (int i = 0; i < count; ++i) out[k0 + i] = piece[i * 16 + lane];
    }
    if (factor != 1.0f) scale(factor, out, k);
}

HR_INLINE void rotate(float* x, const float* cos_sin, int rotary_dim) {
    const int half = rotary_dim / 2;
    for (int i = 0; i < half; i += N) {
        const int n = part(half, i);
        const VF c = load_part(cos_sin + i, n), s = load_part(cos_sin + half + i, n);
        const VF a = load_part(x + i, n), b = load_part(x + half + i, n);
        store_part(x + i, fma(a, c, neg(mul(b, s))), n);
        store_part(x + half + i, fma(b, c, mul(a, s)), n);
    }
}

HR_INLINE void copy(const float* from, float* to, int n) {
    for (int i = 0; i < n; i += N) store_part(to + i, load_part(from + i, part(n, i)), part(n, i));
}

HR_INLINE void to_f16(const float* x, int n, uint16_t* out) {
    alignas(64) uint16_t lanes[N];
    for (int i = 0; i < n; i += N) {
        const int count = part(n, i);
        const VF clamped = max(bcast(-65504.0f), min(bcast(65504.0f), load_part(x + i, count)));
        store_f16(count == N ? out + i : lanes, clamped);
        for (int j = 0; count < N && j < count; ++j) out[i + j] = lanes[j];
    }
}

// One int8 group of n values; returns the scale.
HR_INLINE float to_i8(const float* x, int n, int8_t* out) {
    VI top = ibcast(0);
    for (int i = 0; i < n; i += N) top = imax(top, iand(bits(load_part(x + i, part(n, i))), ibcast(0x7fffffff)));
    const float amax = __builtin_bit_cast(float, reduce_max(top));
    const VF inverse = bcast(amax > 0 ? 127.0f / amax : 0.0f);
    for (int i = 0; i < n; i += N) {
        const int count = part(n, i);
        alignas(16) int8_t lanes[N];
        store_i8(count == N ? out + i : lanes,
                 imax(ibcast(-127), imin(ibcast(127), round_int(mul(load_part(x + i, count), inverse)))));
        for (int j = 0; count < N && j < count; ++j) out[i + j] = lanes[j];
    }
    return amax * (1.0f / 127.0f);
}

template <class T>
HR_INLINE void scatter(const RopeTask& t, int head, const T* key, const T* value) {
    T* k = (T*)t.key + int64_t(head) * t.head_dim * t.block_size + t.offset;
    T* v = (T*)t.value + (int64_t(head) * t.block_size + t.offset) * t.head_dim;
    for (int d = 0; d < t.head_dim; ++d) k[int64_t(d) * t.block_size] = key[d];
    for (int d = 0; d < t.head_dim; ++d) v[d] = value[d];
}

static void store_head(const RopeTask& t, int head, const float* key, const float* value) {
    if (t.kv_type == KvType::F32) {
        scatter(t, head, key, value);
    } else if (t.kv_type == KvType::F16) {
        uint16_t k[kMaxHeadDim], v[kMaxHeadDim];
        to_f16(key, t.head_dim, k);
        to_f16(value, t.head_dim, v);
        scatter(t, head, k, v);
    } else {
        int8_t k[kMaxHeadDim], v[kMaxHeadDim];
        float* scales = t.scales + int64_t(head) * 2 * t.block_size + t.offset;
        scales[0] = to_i8(key, t.head_dim, k);
        scales[t.block_size] = to_i8(value, t.head_dim, v);
        scatter(t, head, k, v);
    }
}

// Norms (if asked) and turns some heads; `to` may be `from`.
HR_INLINE void turn_heads(const RopeTask& t, const float* from, int heads, const float* norm, float* to) {
    const int dim = t.head_dim;
    if (norm && t.full_norm) normalize(from, norm, t.norm_eps, heads * dim, to);
    for (int h = 0; h < heads; ++h) {
        if (!norm) copy(from + h * dim, to + h * dim, dim);
        else if (!t.full_norm) normalize(from + h * dim, norm, t.norm_eps, dim, to + h * dim);
        rotate(to + h * dim, t.cos_sin, t.rotary_dim);
    }
}

static void rope_store(const RopeTask& t) {
    const int dim = t.head_dim;
    turn_heads(t, t.qkv, t.num_heads, t.q_norm, t.q_out);
    if (!t.key) return;
    float* key = t.qkv + t.num_heads * dim;
    turn_heads(t, key, t.num_kv_heads, t.k_norm, key);
    for (int h = 0; h < t.num_kv_heads; ++h) store_head(t, h, key + h * dim, key + (t.num_kv_heads + h) * dim);
}

}  // namespace headrace::HR_ISA
