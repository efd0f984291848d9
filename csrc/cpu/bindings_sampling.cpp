// What surrounds a forward: the inputs of a step before it, the choice of tokens behind it.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "draw.h"
#include "step_inputs.h"
#include "team.h"

namespace nb = nanobind;
using namespace headrace;

namespace {

using Row = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WholeTable = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using GroupArrays = std::tuple<WholeTable, Numbers, int, WholeTable, Longs>;

void require(bool fine, const std::string& what) {
    if (!fine) throw std::invalid_argument(what);
}

StepInputs make_step_inputs(const WholeTable& token_ids, const Numbers& ids, const Numbers& positions,
                            const Numbers& query_start_loc, const Numbers& seq_lens, const std::vector<GroupArrays>& groups) {
    StepInputs s{};
    s.token_ids = token_ids.data();
    s.max_rows = int(token_ids.shape(0));
    s.row_tokens = int(token_ids.shape(1));
    s.max_tokens = int(std::min(ids.shape(0), positions.shape(0)));
    s.max_reqs = int(seq_lens.shape(0));
    require(query_start_loc.shape(0) == seq_lens.shape(0) + 1, "query_start_loc has one entry more than seq_lens");
    s.ids = ids.data();
    s.positions = positions.data();
    s.query_start_loc = query_start_loc.data();
    s.seq_lens = seq_lens.data();
    for (const auto& [table, num_blocks, block_size, step_table, slots] : groups) {
        require(block_size > 0 && table.shape(0) == token_ids.shape(0) && num_blocks.shape(0) == table.shape(0),
                "tables need a row for every row of token ids");
        require(step_table.shape(1) == table.shape(1) && step_table.shape(0) == seq_lens.shape(0),
                "a step's table needs a row for every request");
        require(table.shape(1) * size_t(block_size) >= token_ids.shape(1) && slots.shape(0) >= size_t(s.max_tokens),
                "a table or its slots are too short");
        s.groups.push_back({table.data(), num_blocks.data(), int(table.shape(1)), block_size, step_table.data(), slots.data()});
    }
    return s;
}


// An array argument: of the right type and layout already, since its address is kept and not a converted copy's.
constexpr auto array(const char* name) { return nb::arg(name).noconvert(); }

}  // namespace

void bind_sampling(nb::module_& m) {
    nb::class_<StepInputs>(m, "StepInputs")
        .def("__init__", [](StepInputs* self, const WholeTable& token_ids, const Numbers& ids, const Numbers& positions,
                            const Numbers& starts, const Numbers& lens, const std::vector<GroupArrays>& groups) {
            new (self) StepInputs(make_step_inputs(token_ids, ids, positions, starts, lens, groups));
        }, array("token_ids"), array("ids"), array("positions"), array("query_start_loc"), array("seq_lens"),
           array("groups"))
        .def("fill", [](const StepInputs& s, const Counts& rows, const Counts& num_computed, const Counts& num_new) {
            require(rows.shape(0) == num_computed.shape(0) && rows.shape(0) == num_new.shape(0), "one entry per request");
            return s.fill(rows.data(), num_computed.data(), num_new.data(), int(rows.shape(0)));
        }, array("rows"), array("num_computed"), array("num_new"))
        .def("pad", [](const StepInputs& s, int reqs, int begin, int end) {
            require(reqs >= 0 && reqs <= s.max_reqs && begin >= 0 && begin <= end && end <= s.max_tokens, "no such padding");
            s.pad(reqs, begin, end);
        }, nb::arg("reqs"), nb::arg("begin"), nb::arg("end"));

    m.def("draw_token", [](const Team& team, const Row& x, uint64_t seed, uint64_t position) {
        require(x.shape(0) > 0, "a row without values");
        return draw_token(team.kernels(), x.data(), int(x.shape(0)), seed, position);
    }, nb::arg("team"), array("x"), nb::arg("seed"), nb::arg("position"));
}
