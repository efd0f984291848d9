// Products with float32 activations: float panels as they are, integer panels widened piece by piece.
#pragma once

#include "gemm_int.h"

namespace headrace::HR_ISA {

constexpr int kPiece = 128;  // k of a widened piece; a multiple of the group

HR_INLINE VF load_weight(const float* p) { return load(p); }
struct Half {
    uint16_t bits;
};
struct Brain {
    uint16_t bits;
};
HR_INLINE VF load_weight(const Half* p) { return load_f16((const uint16_t*)p); }
HR_INLINE VF load_weight(const Brain* p) { return load_bf16((const uint16_t*)p); }
HR_INLINE VF load_weight(const int8_t* p) { return load_i8(p); }

// rows x (panels * 16) outputs over `count` k, continuing the chains in acc[rows][ld].
template <class T, int panels, int rows>
HR_KERNEL void float_tile(const T* w, size_t panel_stride, int count, const float* x, int64_t ldx, float* acc, int ld) {
    constexpr int vectors = panels * 16 / N;
    VF a[rows][vectors];
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vectors; ++v) a[r][v] = load(acc + r * ld + v * N);
    for (int k = 0; k < count; ++k) {
        VF wk[vectors];
        for (int v = 0; v < vectors; ++v) wk[v] = load_weight(w + (v * N / 16) * panel_stride + k * 16 + v * N % 16);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            const VF xk = bcast(x[r * ldx + k]);
            for (int v = 0; v < vectors; ++v) a[r][v] = fma(xk, wk[v], a[r][v]);
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vectors; ++v) store(acc + r * ld + v * N, a[r][v]);
}

constexpr int kWide = kManyRegisters ? 2 : 1;   // panels at once for several rows
constexpr int kNarrow = kManyRegisters ? 4 : 2; // panels at once for one row

template <class T>
static void float_rows(const T* w, size_t stride, int panels, int count, const float* x, int64_t ldx, int rows, float* acc,
                       int ld) {
    constexpr int most = kManyRegisters ? 8 : 4;
    while (rows > 0) {
        const int step = rows >= most ? most : rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
        for (int p = 0; p < panels;) {
            const T* wp = w + p * stride;
            float* ap = acc + 16 * p;
            if (step == 1 && panels - p >= kNarrow) {
                float_tile<T, kNarrow, 1>(wp, stride, count, x, ldx, ap, ld);
                p += kNarrow;
            } else if (panels - p >= kWide) {
                if (step == most) float_tile<T, kWide, most>(wp, stride, count, x, ldx, ap, ld);
                else if (step == 4) float_tile<T, kWide, 4>(wp, stride, count, x, ldx, ap, ld);
                else if (step == 2) float_tile<T, kWide, 2>(wp, stride, count, x, ldx, ap, ld);
                else float_tile<T, kWide, 1>(wp, stride, count, x, ldx, ap, ld);
                p += kWide;
            } else {
                if (step == most) float_tile<T, 1, most>(wp, stride, count, x, ldx, ap, ld);
                else if (step == 4) float_tile<T, 1, 4>(wp, stride, count, x, ldx, ap, ld);
                else if (step == 2) float_tile<T, 1, 2>(wp, stride, count, x, ldx, ap, ld);
                else float_tile<T, 1, 1>(wp, stride, count, x, ldx, ap, ld);
                p += 1;
            }
        }
        rows -= step;
        x += step * ldx;
        acc += step * ld;
    }
}

// Float16 scales take a power of two without rounding, so that a nibble may be multiplied where it lies in its half word.
constexpr bool lifts(Format format, bool wide) { return kManyRegisters && format == Format::I4 && !wide; }

// Scales of a group for N outputs; d[i] is for a nibble lifted by 4 * i bits.
template <Format format, bool wide>
struct Scales {
    VF d[lifts(format, wide) ? 4 : 1], second;

    HR_INLINE Scales load(const uint8_t* group, int part) {
        Scales s;
        load_scales<format, wide>(group, part, s.d[0], s.second);
        if constexpr (lifts(format, wide)) {
            s.d[1] = mul(s.d[0], bcast(1.0f / 16));
            s.d[2] = mul(s.d[0], bcast(1.0f / 256));
            s.d[3] = mul(s.d[0], bcast(1.0f / 4096));
        }
        return s;
    }
};

// Weight 16 * half + 4 * i + j of a group, for the N outputs whose bytes and scales these are.
template <Format format, bool wide, int half, int j>
HR_INLINE VF widen_one(const uint8_t* bytes, int i, const Scales<format, wide>& s) {
    constexpr int shift = 8 * j + 4 * half;
    if constexpr (lifts(format, wide)) {
        const VI raw = as_int(uload(bytes + 64 * i));
        const VI word = shift >= 16 ? shift_right<16>(raw) : raw;
        return fma(s.d[shift % 16 / 4], to_float(iand(word, ibcast(15 << shift % 16))), s.second);
    } else if constexpr (format == Format::I4) {
        return fma(s.d[0], nibble<shift>(as_int(uload(bytes + 64 * i))), s.second);
    } else {
        const VI raw = as_int(uload(bytes + 64 * (4 * half + i)));
        const VF q = to_float(shift_right_signed<24>(shift_left<24 - 8 * j>(raw)));
        if constexpr (has_min(format)) return fma(s.d[0], q, s.second);
        else return mul(format == Format::I8G16 && half ? s.second : s.d[0], q);
    }
}

template <Format format, bool wide, int half>
HR_INLINE void widen_half(const uint8_t* bytes, const Scales<format, wide>& s, float* out) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i, out += 64) {
        store(out, widen_one<format, wide, half, 0>(bytes, i, s));
        store(out + 16, widen_one<format, wide, half, 1>(bytes, i, s));
        store(out + 32, widen_one<format, wide, half, 2>(bytes, i, s));
        store(out + 48, widen_one<format, wide, half, 3>(bytes, i, s));
    }
}

// Widens `count` k from `k0` of one panel to out[count][16].
template <Format format, bool wide>
HR_INLINE void widen_piece(const uint8_t* panel, int k0, int count, float* out) {
    for (int g = k0 / kGroup; g < (k0 + count) / kGroup; ++g, out += kGroup * 16) {
        const uint8_t* block = panel + g * group_stride(format, wide);
        for (int part = 0; part < 16; part += N) {
            const auto s = Scales<format, wide>::load(block, part);
            widen_half<format, wide, 0>(block + 4 * part, s, out + part);
            widen_half<format, wide, 1>(block + 4 * part, s, out + kGroup / 2 * 16 + part);
        }
    }
}

static void widen(Format format, bool wide, const uint8_t* panel, int k0, int count, float* out) {
    switch (format) {
        case Format::I4:
            return wide ? widen_piece<Format::I4, true>(panel, k0, count, out)
                        : widen_piece<Format::I4, false>(panel, k0, count, out);
        case Format::I8:
            return wide ? widen_piece<Format::I8, true>(panel, k0, count, out)
                        : widen_piece<Format::I8, false>(panel, k0, count, out);
        case Format::I8M: return widen_piece<Format::I8M, true>(panel, k0, count, out);
        default: return widen_piece<Format::I8G16, true>(panel, k0, count, out);
    }
}

// rows x (panels * 16) outputs whose weights pass through registers alone.
template <Format format, bool wide, int panels, int rows>
struct FusedTile {
    static constexpr int vectors = panels * 16 / N;
    const uint8_t* bytes[vectors];
    Scales<format, wide> scales[vectors];
    VF acc[rows][vectors];

    template <int half, int j>
    HR_INLINE void step(FusedTile& t, int i, const float* x, int64_t ldx) {
        VF w[vectors];
        for (int v = 0; v < vectors; ++v) w[v] = widen_one<format, wide, half, j>(t.bytes[v], i, t.scales[v]);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            const VF xk = bcast(x[r * ldx + 4 * i + j]);
            for (int v = 0; v < vectors; ++v) t.acc[r][v] = fma(xk, w[v], t.acc[r][v]);
        }
    }

    template <int half>
    HR_INLINE void half_group(FusedTile& t, const float* x, int64_t ldx) {
#pragma GCC unroll 1
        for (int i = 0; i < 4; ++i) {
            step<half, 0>(t, i, x, ldx);
            step<half, 1>(t, i, x, ldx);
            step<half, 2>(t, i, x, ldx);
            step<half, 3>(t, i, x, ldx);
        }
    }
};

template <Format format, bool wide, int panels, int rows>
HR_KERNEL void fused_tile(const uint8_t* w, size_t panel_stride, int groups, const float* x, int64_t ldx, float* out) {
    using Tile = FusedTile<format, wide, panels, rows>;
    constexpr size_t stride = group_stride(format, wide);
    Tile t;
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < Tile::vectors; ++v) t.acc[r][v] = zero();
    // What a panel will need, then what the panel in its place of the next tile will: side by side they are no single stream.
    constexpr int distance = kPrefetchAhead / stride;
    size_t ahead = distance * stride;
    for (int g = 0; g < groups; ++g, w += stride, x += kGroup) {
        if (g + distance == groups) ahead += panels * panel_stride - groups * stride;
        for (int v = 0; v < Tile::vectors; ++v) {
            const uint8_t* block = w + v * N / 16 * panel_stride;
            const int part = v * N % 16;
            for (size_t line = 0; part == 0 && line < stride; line += 64) prefetch(block + ahead + line);
            t.scales[v] = Scales<format, wide>::load(block, part);
            t.bytes[v] = block + 4 * part;
        }
        Tile::template half_group<0>(t, x, ldx);
        Tile::template half_group<1>(t, x + kGroup / 2, ldx);
    }
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < Tile::vectors; ++v) store(out + r * panels * 16 + v * N, t.acc[r][v]);
}

// Up to here, widening weights again for each tile of rows costs less than taking them through memory.
constexpr int kFusedRows = kManyRegisters ? 32 : 16;

// Panels of a tile. Few rows need several: a sum waits for itself, so that many must run side by side.
constexpr int fused_panels(int rows) {
    if (!kManyRegisters) return rows == 1 ? 2 : 1;
    return rows == 16 ? 1 : rows == 8 || rows == 3 ? 2 : 4;
}

template <Format format, bool wide, int panels, int rows>
static void fused_columns(const GemmTask& t, int panel, int row) {
    alignas(64) float out[panels * 16 * rows];
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < panels; ++i) prefetch_write(t.out + (row + r) * t.ldo + (panel + i) * kPanel);
    const uint8_t* w = t.panels + panel * t.panel_stride;
    fused_tile<format, wide, panels, rows>(w, t.panel_stride, t.k / kGroup, t.x + row * t.ldx, t.ldx, out);
    write_tile(t, out, panels * 16, panel * kPanel, row, rows);
}

template <Format format, bool wide, int rows>
static int fused_rows(const GemmTask& t, int row) {
    constexpr int most = fused_panels(rows);
    int p = 0;
    for (; p + most <= t.num_panels; p += most) fused_columns<format, wide, most, rows>(t, p, row);
    if constexpr (most == 4)
        for (; p + 2 <= t.num_panels; p += 2) fused_columns<format, wide, 2, rows>(t, p, row);
    for (; p < t.num_panels; ++p) fused_columns<format, wide, 1, rows>(t, p, row);
    return rows;
}

template <Format format, bool wide>
static void gemm_fused(const GemmTask& t) {
    for (int row = t.row_begin; row < t.row_end;) {
        const int rest = t.row_end - row;
        if constexpr (kManyRegisters) {
            if (rest >= 8 && rest != 9) {
                row += rest >= 16 ? fused_rows<format, wide, 16>(t, row) : fused_rows<format, wide, 8>(t, row);
                continue;
            }
        }
        row += rest >= 4 && rest != 5 ? fused_rows<format, wide, 4>(t, row)
               : rest >= 3            ? fused_rows<format, wide, 3>(t, row)
               : rest == 2            ? fused_rows<format, wide, 2>(t, row)
                                      : fused_rows<format, wide, 1>(t, row);
    }
}

static void gemm_fused(const GemmTask& t) {
    switch (t.format) {
        case Format::I4: return t.wide_scales ? gemm_fused<Format::I4, true>(t) : gemm_fused<Format::I4, false>(t);
        case Format::I8: return t.wide_scales ? gemm_fused<Format::I8, true>(t) : gemm_fused<Format::I8, false>(t);
        case Format::I8M: return gemm_fused<Format::I8M, true>(t);
        default: return gemm_fused<Format::I8G16, true>(t);
    }
}

// scratch: acc[128][64], then a widened piece of four panels.
static void gemm_float(const GemmTask& t, float* scratch) {
    if (!is_float(t.format) && t.row_end - t.row_begin <= kFusedRows) return gemm_fused(t);
    constexpr int most_rows = 128, width = 64;
    float* acc = scratch;
    float* piece = scratch + most_rows * width;
    for (int row = t.row_begin; row < t.row_end; row += most_rows) {
        const int rows = t.row_end - row < most_rows ? t.row_end - row : most_rows;
        const float* x = t.x + row * t.ldx;
        for (int p = 0; p < t.num_panels; p += 4) {
            const int panels = t.num_panels - p < 4 ? t.num_panels - p : 4;
            const uint8_t* w = t.panels + p * t.panel_stride;
            for (int i = 0; i < rows * width; ++i) acc[i] = 0;
            if (t.format == Format::F32) {
                float_rows((const float*)w, t.panel_stride / 4, panels, t.k, x, t.ldx, rows, acc, width);
            } else if (t.format == Format::F16) {
                float_rows((const Half*)w, t.panel_stride / 2, panels, t.k, x, t.ldx, rows, acc, width);
            } else if (t.format == Format::BF16) {
                float_rows((const Brain*)w, t.panel_stride / 2, panels, t.k, x, t.ldx, rows, acc, width);
            } else {
                for (int k = 0; k < t.k; k += kPiece) {
                    const int count = t.k - k < kPiece ? t.k - k : kPiece;
                    for (int i = 0; i < panels; ++i)
                        widen(t.format, t.wide_scales, w + i * t.panel_stride, k, count, piece + i * kPiece * 16);
                    float_rows((const float*)piece, kPiece * 16, panels, count, x + k, t.ldx, rows, acc, width);
                }
            }
            for (int i = 0; i < panels; ++i) {
                const int col = (p + i) * kPanel;
                for (int r = 0; r < rows; ++r) write_tile(t, acc + r * width + 16 * i, 16, col, row + r, 1);
            }
        }
    }
}

}  // namespace headrace::HR_ISA
