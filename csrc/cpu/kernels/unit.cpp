// One kernel unit: this file is compiled once per instruction set (see CMakeLists.txt).

#include "table.h"

#include "attention.h"
#include "best.h"
#include "sampling.h"

namespace headrace {

#define HR_JOIN2(a, b) a##b
#define HR_JOIN(a, b) HR_JOIN2(a, b)

const Kernels* HR_JOIN(kernels_, HR_ISA)() {
    using namespace HR_ISA;
    static constexpr Kernels kernels = {
        HR_ISA_NAME, HR_ISA::gemm_int,  HR_ISA::gemm_float, HR_ISA::quantize,   HR_ISA::gate,
        HR_ISA::rms_norm, HR_ISA::add, HR_ISA::scale_add,  HR_ISA::scale,      HR_ISA::embed,
        HR_ISA::rope_store, HR_ISA::attend, HR_ISA::merge_partials, HR_ISA::arg_max, HR_ISA::softmax,
        HR_ISA::find_contenders, HR_ISA::apply_bitmask, HR_ISA::apply_penalties, HR_ISA::scale_logits,
        HR_ISA::block_peaks, HR_ISA::weigh,
        HR_ISA::find_best,
    };
    return &kernels;
}

}  // namespace headrace
