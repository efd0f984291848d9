// What surrounds a forward: the inputs of a step before it, the choice of tokens behind it.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>

#include "draw.h"
#include "plan.h"
#include "sampling.h"
#include "step_inputs.h"
#include "team.h"

namespace nb = nanobind;
using namespace headrace;

namespace {

using Row = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Counts = std::vector<int64_t>;
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

// The plan of the head with the buffers that it reads and writes, which live as long as it is used.
struct HeadReplay {
    const Plan& plan;
    int32_t *index, *best;
    float* peaks;
    int max_rows;

    // Ids and values of the greatest logits of some rows, behind the forward that computes them if it is given. Without
    // Python in between no thread of the team falls asleep.
    std::pair<std::vector<int32_t>, std::vector<float>> replay(Team& team, const Plan* forward, int tokens, int reqs,
                                                               const Counts& rows, int num_best) const {
        const int count = int(rows.size());
        require(count <= max_rows, "the head has room for " + std::to_string(max_rows) + " rows");
        for (const int64_t row : rows) require(row >= 0 && row < tokens, "row " + std::to_string(row) + " is not computed");
        std::copy(rows.begin(), rows.end(), index);
        nb::gil_scoped_release release;
        if (forward) forward->replay(team, {tokens, reqs});
        plan.replay(team, {tokens, 0, count, num_best});
        return {{best, best + count}, {peaks, peaks + count}};
    }
};

// Row, peak, temperature, top_k, least, top_p, seed, position.
using DrawArguments = std::tuple<Row, float, float, int, float, double, uint64_t, uint64_t>;
// Row, token, how many of the best.
using LogprobArguments = std::tuple<Row, int, int>;

// No exception may leave a piece, which may be on any thread of the team: the first row's is thrown again behind all of them.
template <class F> void for_each_row(Team& team, size_t count, F&& work) {
    if (count == 1) return work(size_t(0));
    std::vector<std::exception_ptr> failures(count);
    const auto try_row = [&](int64_t i) {
        try {
            work(size_t(i));
        } catch (...) {
            failures[size_t(i)] = std::current_exception();
        }
    };
    team.run([&](int tid) { team.for_each(tid, int64_t(count), try_row); });
    for (const auto& failure : failures)
        if (failure) std::rethrow_exception(failure);
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
            require(rows.size() == num_computed.size() && rows.size() == num_new.size(), "one entry per request");
            return s.fill(rows.data(), num_computed.data(), num_new.data(), int(rows.size()));
        }, nb::arg("rows"), nb::arg("num_computed"), nb::arg("num_new"))
        .def("pad", [](const StepInputs& s, int reqs, int begin, int end) {
            require(reqs >= 0 && reqs <= s.max_reqs && begin >= 0 && begin <= end && end <= s.max_tokens, "no such padding");
            s.pad(reqs, begin, end);
        }, nb::arg("reqs"), nb::arg("begin"), nb::arg("end"));

    nb::class_<HeadReplay>(m, "HeadReplay")
        .def("__init__", [](HeadReplay* self, const Plan& plan, const Numbers& index, const Numbers& best, const Floats& peaks) {
            const size_t rows = index.shape(0);
            require(best.shape(0) >= rows && peaks.shape(0) >= rows, "best and peaks must have room for every row");
            new (self) HeadReplay{plan, index.data(), best.data(), peaks.data(), int(rows)};
        }, nb::keep_alive<1, 2>(), nb::arg("plan"), array("index"), array("best"), array("peaks"))
        .def("replay", &HeadReplay::replay, nb::arg("team"), nb::arg("forward").none(), nb::arg("tokens"), nb::arg("reqs"),
             nb::arg("rows"), nb::arg("num_best"));

    m.def("apply_bitmask", [](const Team& team, const Floats& x, const Words& words) {
        require(words.shape(0) * 32 >= x.shape(0), "a grammar bitmask of " + std::to_string(words.shape(0)) +
                                                       " words cannot cover " + std::to_string(x.shape(0)) + " tokens");
        team.kernels().apply_bitmask(x.data(), reinterpret_cast<const uint32_t*>(words.data()), int(x.shape(0)));
    }, nb::arg("team"), array("x"), array("words"));
    m.def("apply_penalties", [](const Team& team, const Floats& x, const Flags& in_prompt, const Words& counts, float repetition,
                                float frequency, float presence) {
        require(in_prompt.shape(0) == x.shape(0) && counts.shape(0) == x.shape(0), "one count per token");
        team.kernels().apply_penalties(x.data(), reinterpret_cast<const uint8_t*>(in_prompt.data()), counts.data(),
                                       int(x.shape(0)), repetition, frequency, presence);
    }, nb::arg("team"), array("x"), array("in_prompt"), array("counts"), nb::arg("repetition"), nb::arg("frequency"),
       nb::arg("presence"));
    // Rows of several requests are pieces of the team.
    m.def("draw", [](Team& team, const std::vector<DrawArguments>& rows) {
        std::vector<int> tokens(rows.size());
        for (const auto& [x, peak, temperature, top_k, least, top_p, seed, position] : rows)
            require(x.shape(0) > 0 && temperature > 0, "a draw needs values and a temperature");
        nb::gil_scoped_release release;
        for_each_row(team, rows.size(), [&](size_t i) {
            const auto& [x, peak, temperature, top_k, least, top_p, seed, position] = rows[i];
            const Draw how{peak, temperature, {top_k, least, top_p}, seed, position};
            tokens[i] = draw_row(team.kernels(), x.data(), int(x.shape(0)), how);
        });
        return tokens;
    }, nb::arg("team"), nb::arg("rows"));
    m.def("token_logprobs", [](Team& team, const std::vector<LogprobArguments>& rows) {
        std::vector<std::tuple<std::vector<int32_t>, std::vector<double>, int>> found(rows.size());
        for (const auto& [x, token, num_best] : rows)
            require(token >= 0 && size_t(token) < x.shape(0) && num_best >= 0, "no such token");
        nb::gil_scoped_release release;
        for_each_row(team, rows.size(), [&](size_t i) {
            const auto& [x, token, num_best] = rows[i];
            found[i] = token_logprobs(team.kernels(), x.data(), int(x.shape(0)), token, num_best);
        });
        return found;
    }, nb::arg("team"), nb::arg("rows"));
}
