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

// Widens `count` k from `k0` of one panel to out[count][16].
template <Format format, bool wide>
HR_INLINE void widen_piece(const uint8_t* panel, int k0, int count, float* out) {
    for (int g = k0 / kGroup; g < (k0 + count) / kGroup; ++g, out += kGroup * 16) {
        for (int part = 0; part < 16; part += N) {
            const uint8_t* block = panel + g * group_stride(format, wide);
            const uint8_t* s = block + group_bytes(format);
            const VF d = format == Format::I8G16 ? load((const float*)s + part) : load_scale<wide>(s, part);
            const VF second = format == Format::I8G16 ? load((const float*)s + 16 + part)
                              : has_min(format)       ? load_scale<wide>(s, 16 + part)
                                                      : zero();
            const uint8_t* bytes = block + 4 * part;
            if constexpr (format == Format::I4) {
                for (int i = 0; i < 4; ++i) {
                    const U raw = uload(bytes + 64 * i);
                    const VI low = as_int(low_nibbles(raw)), high = as_int(high_nibbles(raw));
                    const VI mask = ibcast(0xff);
                    const VI ql[4] = {iand(low, mask), iand(shift_right<8>(low), mask), iand(shift_right<16>(low), mask),
                                      shift_right<24>(low)};
                    const VI qh[4] = {iand(high, mask), iand(shift_right<8>(high), mask), iand(shift_right<16>(high), mask),
                                      shift_right<24>(high)};
                    for (int j = 0; j < 4; ++j) {
                        store(out + (4 * i + j) * 16 + part, fma(d, to_float(ql[j]), second));
                        store(out + (16 + 4 * i + j) * 16 + part, fma(d, to_float(qh[j]), second));
                    }
                }
            } else {
                for (int i = 0; i < 8; ++i) {
                    const VI raw = as_int(uload(bytes + 64 * i));
                    const VI q[4] = {shift_right_signed<24>(shift_left<24>(raw)), shift_right_signed<24>(shift_left<16>(raw)),
                                     shift_right_signed<24>(shift_left<8>(raw)), shift_right_signed<24>(raw)};
                    const VF scale = format == Format::I8G16 && i >= 4 ? second : d;
                    for (int j = 0; j < 4; ++j) {
                        const VF y = has_min(format) ? fma(scale, to_float(q[j]), second) : mul(scale, to_float(q[j]));
                        store(out + (4 * i + j) * 16 + part, y);
                    }
                }
            }
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

// scratch: acc[128][64], then a widened piece of four panels.
static void gemm_float(const GemmTask& t, float* scratch) {
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
