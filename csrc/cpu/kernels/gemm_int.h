// Products of packed integer weights with int8 activations.
#pragma once

#include "functions.h"

namespace headrace::HR_ISA {

template <bool wide>
HR_INLINE VF load_scale(const uint8_t* scales, int index) {
    if constexpr (wide) return load((const float*)scales + index);
    else return load_f16((const uint16_t*)scales + index);
}

// Scales of a group for N outputs from `part`, and minima or the scales of the upper half.
template <Format format, bool wide>
HR_INLINE void load_scales(const uint8_t* group, int part, VF& d, VF& second) {
    const uint8_t* s = group + group_bytes(format);
    d = format == Format::I8G16 ? load((const float*)s + part) : load_scale<wide>(s, part);
    second = format == Format::I8G16 ? load((const float*)s + 16 + part)
             : has_min(format)       ? load_scale<wide>(s, 16 + part)
                                     : zero();
}

// Rows of one group of activations: constant offsets from here reach them.
struct RowView {
    const ActivationRow* rows;

    HR_INLINE RowView at(const ActivationGroup* x, int row) { return {x->rows + row}; }
    RowView next() const { return {rows + kTile}; }
    const int8_t* bytes(int r) const { return rows[r].q; }
    float scale_of(int r) const { return rows[r].scale; }
    float scaled_sum(int r) const { return rows[r].scaled_sum; }
    int32_t correction(int r) const { return rows[r].correction; }
};

template <Format format>
struct DotOf {
    using type = Dot8;
};
template <>
struct DotOf<Format::I4> {
    using type = Dot4;
};

// One group of some rows: the exact integer sums. The rows take turns, so that their chains overlap in a small window.
template <Format format, int count>
HR_INLINE void group_sums(const U (&w)[8], const RowView& x, int first, VI (&sums)[count]) {
    using Dot = typename DotOf<format>::type;
    Dot d[count];
    for (int r = 0; r < count; ++r) d[r] = Dot::start(x.correction(first + r));
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
#pragma GCC unroll 8
        for (int r = 0; r < count; ++r) d[r] = Dot::step(d[r], w[i], x.bytes(first + r) + 4 * i);
    for (int r = 0; r < count; ++r) sums[r] = Dot::finish(d[r]);
}

// The two halves of a group apart. The correction covers the whole group, so it is made here for each half.
HR_INLINE void half_sums(const U (&w)[8], const RowView& x, int r, VI& low, VI& high) {
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += x.bytes(r)[i];
    Dot8 a = Dot8::start(-128 * sum), b = Dot8::start(x.correction(r) + 128 * sum);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        a = Dot8::step(a, w[i], x.bytes(r) + 4 * i);
        b = Dot8::step(b, w[4 + i], x.bytes(r) + 4 * (4 + i));
    }
    low = Dot8::finish(a);
    high = Dot8::finish(b);
}

template <Format format>
HR_INLINE void load_group(const uint8_t* bytes, U (&w)[8]) {
    if constexpr (format == Format::I4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const U raw = uload(bytes + 64 * i);
            w[i] = low_nibbles(raw);
            w[4 + i] = high_nibbles(raw);
        }
    } else {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) w[i] = Dot8::prepare(uload(bytes + 64 * i));
    }
}

// Bytes from what is multiplied to what is fetched. One or two rows take weights as fast as they come; more rows leave time to
// fetch them to the second level of the cache first, which waits for more lines at once than the first one does.
constexpr int kPrefetchAhead = 4096, kNearAhead = 1024, kFarAhead = 12288;
constexpr int kTurn = kManyRegisters ? 2 : 1;  // rows that take turns

// `rows` rows of one tile, from `row`, times one panel: out[rows][ldo], sixteen columns.
template <Format format, bool wide, int rows>
HR_KERNEL void int_tile(const uint8_t* panel, int groups, const ActivationGroup* x, int row, float* out, int64_t ldo) {
    constexpr size_t stride = group_stride(format, wide);
    for (int part = 0; part < 16; part += N) {
        VF acc[rows];
        for (int r = 0; r < rows; ++r) acc[r] = zero();
        RowView xg = RowView::at(x, row);
        for (int r = 0; r < rows; ++r) prefetch_write(out + r * ldo + part);
        const uint8_t* bytes = panel + 4 * part;
        const uint8_t* end = bytes + groups * stride;
        for (; bytes != end; bytes += stride, xg = xg.next()) {
            for (size_t line = 0; line < stride; line += 64 * (16 / N)) {
                if constexpr (rows <= 2) {
                    prefetch(bytes + kPrefetchAhead + line);
                } else {
                    prefetch_far(bytes + kFarAhead + line);
                    prefetch(bytes + kNearAhead + line);
                }
            }
            U w[8];
            load_group<format>(bytes, w);
            VF d, second;
            load_scales<format, wide>(bytes - 4 * part, part, d, second);
            constexpr int turn = rows % kTurn ? 1 : kTurn;
#pragma GCC unroll 16
            for (int r = 0; r < rows; r += turn) {
                if constexpr (format == Format::I8G16) {
                    for (int i = 0; i < turn; ++i) {
                        VI low, high;
                        half_sums(w, xg, r + i, low, high);
                        acc[r + i] = fma(to_float(low), mul(d, bcast(xg.scale_of(r + i))), acc[r + i]);
                        acc[r + i] = fma(to_float(high), mul(second, bcast(xg.scale_of(r + i))), acc[r + i]);
                    }
                } else {
                    VI sums[turn];
                    group_sums<format>(w, xg, r, sums);
#pragma GCC unroll 4
                    for (int i = 0; i < turn; ++i) {
                        acc[r + i] = fma(to_float(sums[i]), mul(d, bcast(xg.scale_of(r + i))), acc[r + i]);
                        if constexpr (has_min(format)) acc[r + i] = fma(second, bcast(xg.scaled_sum(r + i)), acc[r + i]);
                    }
                }
            }
        }
        for (int r = 0; r < rows; ++r) store(out + r * ldo + part, acc[r]);
    }
}

// The largest tile that fits, but none of one row after others: alone it waits for its own sums.
template <Format format, bool wide>
static int int_rows(const uint8_t* panel, int groups, const ActivationGroup* x, int row, int rows, float* out, int64_t ldo) {
    if (rows >= 16) return int_tile<format, wide, 16>(panel, groups, x, row, out, ldo), 16;
    if (rows >= 8 && rows != 9) return int_tile<format, wide, 8>(panel, groups, x, row, out, ldo), 8;
    if (rows >= 4 && rows != 5) return int_tile<format, wide, 4>(panel, groups, x, row, out, ldo), 4;
    if (rows >= 3) return int_tile<format, wide, 3>(panel, groups, x, row, out, ldo), 3;
    if (rows >= 2) return int_tile<format, wide, 2>(panel, groups, x, row, out, ldo), 2;
    return int_tile<format, wide, 1>(panel, groups, x, row, out, ldo), 1;
}

// Nothing is done to sums of columns up to `end` after their chains: a tile may put them where they belong.
HR_INLINE bool is_plain(const GemmTask& t, int end) { return !t.bias && !(t.softcap > 0) && end <= t.cols; }

// Writes acc[rows][width] to columns [col, col + width) of rows from `row`, with bias and soft cap, inside `cols`.
HR_INLINE void write_tile(const GemmTask& t, const float* acc, int width, int col, int row, int rows) {
    for (int r = 0; r < rows; ++r) {
        float* out = t.out + (row + r) * t.ldo + col;
        for (int c = 0; c < width; c += N) {
            const int n = part(t.cols, col + c);
            VF y = load(acc + r * width + c);
            if (t.bias) y = add(y, load_part(t.bias + col + c, n));
            if (t.softcap > 0) y = mul(bcast(t.softcap), tanh(div(y, bcast(t.softcap))));
            if (n == N) store(out + c, y);
            else store_part(out + c, y, n);
        }
    }
}

template <Format format, bool wide>
static void gemm_int_format(const GemmTask& t) {
    const int groups = t.k / kGroup;
    alignas(64) float acc[kTile * kPanel];
    for (int p = 0; p < t.num_panels; ++p) {
        const uint8_t* panel = t.panels + p * t.panel_stride;
        const bool direct = is_plain(t, (p + 1) * kPanel);
        for (int row = t.row_begin; row < t.row_end;) {
            const ActivationGroup* x = t.xq + int64_t(row / kTile) * groups;
            const int in_tile = row % kTile;
            const int rest = t.row_end - row, room = kTile - in_tile;
            float* out = direct ? t.out + row * t.ldo + p * kPanel : acc;
            const int done =
                int_rows<format, wide>(panel, groups, x, in_tile, rest < room ? rest : room, out, direct ? t.ldo : kPanel);
            if (!direct) write_tile(t, acc, kPanel, p * kPanel, row, done);
            row += done;
        }
    }
}

static void gemm_int(const GemmTask& t) {
    switch (t.format) {
        case Format::I4: return t.wide_scales ? gemm_int_format<Format::I4, true>(t) : gemm_int_format<Format::I4, false>(t);
        case Format::I8: return t.wide_scales ? gemm_int_format<Format::I8, true>(t) : gemm_int_format<Format::I8, false>(t);
        case Format::I8M: return gemm_int_format<Format::I8M, true>(t);
        default: return gemm_int_format<Format::I8G16, true>(t);
    }
}

static void quantize(const float* x, int64_t ldx, int row_begin, int row_end, int group_begin, int group_end, int groups,
                     ActivationGroup* xq) {
    constexpr float inverse_127 = 1.0f / 127.0f;
    for (int row = row_begin; row < row_end; ++row, x += ldx) {
        ActivationGroup* tile = xq + int64_t(row / kTile) * groups;
        const int r = row % kTile;
        for (int g = group_begin; g < group_end; ++g) prefetch_write(&tile[g].rows[r]);
        for (int g = group_begin; g < group_end; ++g) {
            const float* values = x + (g - group_begin) * kGroup;
            ActivationRow& to = tile[g].rows[r];
            VF v[kGroup / N];
            VI top = ibcast(0);
            for (int i = 0; i < kGroup / N; ++i) {
                v[i] = load(values + i * N);
                top = imax(top, iand(bits(v[i]), ibcast(0x7fffffff)));
            }
            const float amax = __builtin_bit_cast(float, reduce_max(top));
            const float scale = amax * inverse_127;
            const VF inverse = bcast(amax > 0 ? 127.0f / amax : 0.0f);
            VI total = ibcast(0);
            for (int i = 0; i < kGroup / N; ++i) {
                const VI q = imax(ibcast(-127), imin(ibcast(127), round_int(mul(v[i], inverse))));
                store_i8(to.q + i * N, q);
                total = iadd(total, q);
            }
            const int32_t sum = reduce_add(total);
            to.scale = scale;
            to.scaled_sum = scale * float(sum);
            to.correction = -128 * sum;
        }
    }
}

}  // namespace headrace::HR_ISA
