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

// Weight 16 * half + 4 * i + j of a group, for the N outputs whose bytes, scales and second scales these are.
template <Format format, int half, int j>
HR_INLINE VF widen_one(const uint8_t* bytes, int i, VF d, VF second) {
    if constexpr (format == Format::I4) {
        return fma(d, nibble<8 * j + 4 * half>(as_int(uload(bytes + 64 * i))), second);
    } else {
        const VI raw = as_int(uload(bytes + 64 * (4 * half + i)));
        const VF q = to_float(shift_right_signed<24>(shift_left<24 - 8 * j>(raw)));
        if constexpr (has_min(format)) return fma(d, q, second);
        else return mul(format == Format::I8G16 && half ? second : d, q);
    }
}

template <Format format, int half>
HR_INLINE void widen_half(const uint8_t* bytes, VF d, VF second, float* out) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i, out += 64) {
        store(out, widen_one<format, half, 0>(bytes, i, d, second));
        store(out + 16, widen_one<format, half, 1>(bytes, i, d, second));
        store(out + 32, widen_one<format, half, 2>(bytes, i, d, second));
        store(out + 48, widen_one<format, half, 3>(bytes, i, d, second));
    }
}

// Widens `count` k from `k0` of one panel to out[count][16].
template <Format format, bool wide>
HR_INLINE void widen_piece(const uint8_t* panel, int k0, int count, float* out) {
    for (int g = k0 / kGroup; g < (k0 + count) / kGroup; ++g, out += kGroup * 16) {
        const uint8_t* block = panel + g * group_stride(format, wide);
        for (int part = 0; part < 16; part += N) {
            VF d, second;
            load_scales<format, wide>(block, part, d, second);
            widen_half<format, 0>(block + 4 * part, d, second, out + part);
            widen_half<format, 1>(block + 4 * part, d, second, out + kGroup / 2 * 16 + part);
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
    VF d[vectors], second[vectors];
    VF acc[rows][vectors];

    template <int half, int j>
    HR_INLINE void step(FusedTile& t, int i, const float* x, int64_t ldx) {
        VF w[vectors];
        for (int v = 0; v < vectors; ++v) w[v] = widen_one<format, half, j>(t.bytes[v], i, t.d[v], t.second[v]);
#pragma GCC unroll 8
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
    for (int g = 0; g < groups; ++g, w += stride, x += kGroup) {
        for (int v = 0; v < Tile::vectors; ++v) {
            const uint8_t* block = w + v * N / 16 * panel_stride;
            const int part = v * N % 16;
            for (size_t line = 0; part == 0 && line < stride; line += 64) prefetch(block + kPrefetchAhead + line);
            load_scales<format, wide>(block, part, t.d[v], t.second[v]);
            t.bytes[v] = block + 4 * part;
        }
        Tile::template half_group<0>(t, x, ldx);
        Tile::template half_group<1>(t, x + kGroup / 2, ldx);
    }
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < Tile::vectors; ++v) store(out + r * panels * 16 + v * N, t.acc[r][v]);
}

// Up to here, widening weights again for each tile of rows costs less than taking them through memory.
constexpr int kFusedRows = 16;

template <Format format, bool wide, int panels>
static int fused_rows(const uint8_t* w, size_t panel_stride, int groups, const float* x, int64_t ldx, int rows, float* out) {
    if constexpr (kManyRegisters) {
        if (rows >= 8) return fused_tile<format, wide, panels, 8>(w, panel_stride, groups, x, ldx, out), 8;
    }
    if constexpr (kManyRegisters || panels == 1) {
        if (rows >= 4) return fused_tile<format, wide, panels, 4>(w, panel_stride, groups, x, ldx, out), 4;
        if (rows >= 2) return fused_tile<format, wide, panels, 2>(w, panel_stride, groups, x, ldx, out), 2;
    }
    return fused_tile<format, wide, panels, 1>(w, panel_stride, groups, x, ldx, out), 1;
}

template <Format format, bool wide>
static void gemm_fused(const GemmTask& t) {
    alignas(64) float out[8 * 32];
    const int rows = t.row_end - t.row_begin, most = kManyRegisters || rows == 1 ? 2 : 1;
    for (int p = 0, panels; p < t.num_panels; p += panels) {
        panels = t.num_panels - p < most ? t.num_panels - p : most;
        const uint8_t* w = t.panels + p * t.panel_stride;
        for (int row = t.row_begin, done; row < t.row_end; row += done) {
            const float* x = t.x + row * t.ldx;
            const int rest = t.row_end - row, groups = t.k / kGroup;
            done = panels == 2 ? fused_rows<format, wide, 2>(w, t.panel_stride, groups, x, t.ldx, rest, out)
                               : fused_rows<format, wide, 1>(w, t.panel_stride, groups, x, t.ldx, rest, out);
            write_tile(t, out, panels * 16, p * kPanel, row, done);
        }
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
