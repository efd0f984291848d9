// The Python module `headrace.device.ops.cpu._native`.
//
// Arrays come in through DLPack; shapes, types and sizes are checked here, contents (ids, slots, tables) by the ops before
// they run. Ops keep plain pointers: the caller keeps the arrays alive for as long as the op.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "byte_hash.h"
#include "features.h"
#include "head.h"
#include "ops.h"
#include "plan.h"

namespace nb = nanobind;
using namespace headrace;

namespace {

using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Stretch = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<int32_t, nb::ndim<2>, nb::device::cpu>;
using Blocks = nb::ndarray<nb::ndim<4>, nb::device::cpu>;

void require(bool fine, const std::string& what) {
    if (!fine) throw std::invalid_argument(what);
}

void require_shape(const Matrix& m, size_t rows, size_t cols, const char* name) {
    require(m.shape(0) == rows && m.shape(1) == cols,
            std::string(name) + " must be [" + std::to_string(rows) + ", " + std::to_string(cols) + "], not [" +
                std::to_string(m.shape(0)) + ", " + std::to_string(m.shape(1)) + "]");
}

void require_length(const Vector& v, size_t length, const char* name) {
    require(v.shape(0) == length, std::string(name) + " must have " + std::to_string(length) + " values");
}

Sizes room_for(Rows rows, size_t count) {
    Sizes room = Op::kUnlimited;
    (rows == Rows::Tokens ? room.tokens : room.logit_rows) = int(count);
    return room;
}

Activation parse_activation(const std::string& name) {
    if (name == "silu") return Activation::Silu;
    if (name == "gelu") return Activation::Gelu;
    require(name == "gelu_tanh", "unknown activation '" + name + "'");
    return Activation::GeluTanh;
}

std::shared_ptr<Weight> pack(Team& team, const std::vector<std::tuple<std::string, Bytes>>& parts, int in_features,
                             const std::string& quantize, bool gated) {
    std::vector<SourceTensor> sources;
    require(!parts.empty() && in_features > 0, "a weight needs parts and a width");
    require(!gated || (parts.size() == 2 && std::get<1>(parts[0]).shape(0) == std::get<1>(parts[1]).shape(0)),
            "a gated weight has two parts of equal shape");
    for (const auto& [format, data] : parts) {
        const FileFormat* known = find_file_format(format);
        require(known, "weights of format " + format + " have no packed form");
        const int whole = std::max(known->values, known->read ? kGroup : 1);
        require(in_features % whole == 0, format + " rows must be whole groups of " + std::to_string(whole));
        const size_t bytes = known->row_bytes(in_features);
        require(data.shape(1) == bytes, "a row of " + std::to_string(in_features) + " " + format + " values has " +
                                            std::to_string(bytes) + " bytes, not " + std::to_string(data.shape(1)));
        sources.push_back({known, int(data.shape(0)), data.data(), bytes});
    }
    nb::gil_scoped_release release;
    return pack_weight(team, sources, in_features, quantize, gated);
}

// A weight from `pieces` that lie packed in memory already; `forms` are the formats and rows that it was packed from.
std::shared_ptr<Weight> adopt(Team& team, const std::vector<std::tuple<std::string, int>>& forms, int in_features,
                              const std::string& quantize, bool gated, const std::vector<Stretch>& pieces) {
    require(!forms.empty() && in_features > 0 && !pieces.empty(), "a weight needs parts, a width and pieces");
    require(!gated || (forms.size() == 2 && std::get<1>(forms[0]) == std::get<1>(forms[1])),
            "a gated weight has two parts of equal shape");
    std::vector<SourceTensor> sources;
    for (const auto& [format, rows] : forms) {
        const FileFormat* known = find_file_format(format);
        require(known && rows > 0, "weights of format " + format + " have no packed form");
        sources.push_back({known, rows, nullptr, 0});
    }
    std::vector<Piece> packed;
    for (const Stretch& piece : pieces) {
        require(uintptr_t(piece.data()) % 64 == 0, "packed pieces lie on borders of 64 bytes");
        std::shared_ptr<void> owner(new Stretch(piece), [](void* p) {
            nb::gil_scoped_acquire acquire;
            delete static_cast<Stretch*>(p);
        });
        packed.push_back({const_cast<uint8_t*>(piece.data()), piece.size(), std::move(owner)});
    }
    return pack_weight(team, sources, in_features, quantize, gated, packed);
}

nb::list get_pieces(std::shared_ptr<Weight> weight) {
    nb::list pieces;
    for (const Piece& piece : weight->pieces)
        pieces.append(nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(piece.data, {piece.bytes}, nb::find(weight)));
    return pieces;
}

ProductInput make_input(const Matrix& x, const Weight& weight, Rows rows, bool exact) {
    require(int(x.shape(1)) == weight.in_features,
            "x has " + std::to_string(x.shape(1)) + " columns, the weight has " + std::to_string(weight.in_features));
    ProductInput input{};
    input.rows = rows;
    input.width = weight.in_features;
    input.x = x.data();
    input.exact = exact || !weight.quantized();
    return input;
}

std::shared_ptr<Op> make_embedding(const Ints& ids, std::shared_ptr<Weight> table, float scale, const Matrix& out) {
    require_shape(out, ids.shape(0), size_t(table->in_features), "out");
    auto op = std::make_shared<EmbeddingOp>();
    op->room = room_for(Rows::Tokens, ids.shape(0));
    op->ids = ids.data();
    op->table = std::move(table);
    op->scale = scale;
    op->out = out.data();
    return op;
}

std::shared_ptr<Op> make_norm(const Matrix& x, const std::optional<Matrix>& residual, const Vector& weight, float eps,
                              const Matrix& out, const std::optional<Matrix>& sum_out, Rows rows) {
    require_shape(out, x.shape(0), x.shape(1), "out");
    require_length(weight, x.shape(1), "weight");
    require(residual.has_value() == sum_out.has_value(), "a residual and its sum come together");
    auto op = std::make_shared<NormOp>();
    op->room = room_for(rows, x.shape(0));
    op->rows = rows;
    op->width = int(x.shape(1));
    op->x = x.data();
    if (residual) {
        require_shape(*residual, x.shape(0), x.shape(1), "residual");
        require_shape(*sum_out, x.shape(0), x.shape(1), "sum_out");
        op->residual = residual->data();
        op->sum_out = sum_out->data();
    }
    op->weight = weight.data();
    op->eps = eps;
    op->out = out.data();
    return op;
}

std::shared_ptr<Op> make_add(const Matrix& x, const Matrix& y, const Matrix& out, Rows rows) {
    require_shape(y, x.shape(0), x.shape(1), "y");
    require_shape(out, x.shape(0), x.shape(1), "out");
    auto op = std::make_shared<AddOp>();
    op->room = room_for(rows, x.shape(0));
    op->rows = rows;
    op->width = int(x.shape(1));
    op->x = x.data();
    op->y = y.data();
    op->out = out.data();
    return op;
}

std::shared_ptr<Op> make_gather(const Matrix& x, const Ints& index, const Matrix& out) {
    require_shape(out, index.shape(0), x.shape(1), "out");
    auto op = std::make_shared<GatherOp>();
    op->room = room_for(Rows::Tokens, x.shape(0));
    op->room.logit_rows = int(index.shape(0));
    op->width = int(x.shape(1));
    op->x = x.data();
    op->index = index.data();
    op->out = out.data();
    return op;
}

std::shared_ptr<Op> make_linear(const Matrix& x, std::shared_ptr<Weight> weight, const std::optional<Vector>& bias,
                                float softcap, bool exact, const Matrix& out, Rows rows) {
    require_shape(out, x.shape(0), size_t(weight->out_features), "out");
    auto op = std::make_shared<LinearOp>();
    op->room = room_for(rows, x.shape(0));
    op->input = make_input(x, *weight, rows, exact);
    if (bias) {
        require_length(*bias, size_t(weight->out_features), "bias");
        op->bias = bias->data();
    }
    op->weight = std::move(weight);
    op->softcap = softcap;
    op->out = out.data();
    return op;
}

std::shared_ptr<Op> make_gated(const Matrix& x, std::shared_ptr<Weight> weight, const std::string& activation, bool exact,
                               const Matrix& out, Rows rows) {
    require(weight->segments.size() == 2 && weight->segments[0].rows == weight->segments[1].rows,
            "a gated weight has two parts of equal shape");
    require_shape(out, x.shape(0), size_t(weight->segments[0].rows), "out");
    auto op = std::make_shared<GatedOp>();
    op->room = room_for(rows, x.shape(0));
    op->input = make_input(x, *weight, rows, exact);
    op->weight = std::move(weight);
    op->activation = parse_activation(activation);
    op->out = out.data();
    return op;
}

std::shared_ptr<Op> make_head(const Matrix& x, std::shared_ptr<Weight> weight, float softcap, bool exact, const Ints& best,
                              const Vector& peaks, const Matrix& logits) {
    require(logits.shape(1) >= size_t(weight->out_features), "rows of logits are too short");
    require(best.shape(0) >= x.shape(0) && peaks.shape(0) >= x.shape(0), "best and peaks must have room for every row");
    auto op = std::make_shared<HeadOp>();
    op->room = room_for(Rows::Logits, x.shape(0));
    op->input = make_input(x, *weight, Rows::Logits, exact);
    op->softcap = softcap;
    op->best = best.data();
    op->peaks = peaks.data();
    op->logits = logits.data();
    op->ld = int64_t(logits.shape(1));
    op->max_logits = int(logits.shape(0));
    op->weight = std::move(weight);
    return op;
}

StepView make_step(const Ints& query_start_loc, const Ints& seq_lens, const Table& block_table, const Longs& slots) {
    require(block_table.stride(1) == 1, "rows of the block table must be contiguous");
    require(query_start_loc.shape(0) >= 1, "query_start_loc is empty");
    StepView s{};
    s.query_start_loc = query_start_loc.data();
    s.seq_lens = seq_lens.data();
    s.block_table = block_table.data();
    s.table_stride = block_table.stride(0);
    s.max_blocks = int(block_table.shape(1));
    s.slot_mapping = slots.data();
    s.max_reqs = int(std::min<size_t>({query_start_loc.shape(0) - 1, seq_lens.shape(0), block_table.shape(0)}));
    s.max_tokens = int(slots.shape(0));
    return s;
}

// Inner dimensions must be contiguous; blocks may lie apart.
void require_packed(const Blocks& b, const char* name) {
    require(b.stride(3) == 1 && b.stride(2) == int64_t(b.shape(3)) && b.stride(1) == int64_t(b.shape(2) * b.shape(3)),
            std::string(name) + " blocks must be contiguous");
}

CacheView make_cache(const Blocks& key, const Blocks& value, const std::optional<Blocks>& scales) {
    require_packed(key, "key");
    require_packed(value, "value");
    CacheView c{};
    c.num_blocks = int(key.shape(0));
    c.num_kv_heads = int(key.shape(1));
    c.head_dim = int(key.shape(2));
    c.block_size = int(key.shape(3));
    require(value.shape(0) == key.shape(0) && value.shape(1) == key.shape(1) && value.shape(2) == key.shape(3) &&
                value.shape(3) == key.shape(2),
            "keys must be [block, kv_head, head_dim, token] and values [block, kv_head, token, head_dim]");
    require(key.dtype() == value.dtype(), "keys and values differ in type");
    if (key.dtype() == nb::dtype<float>()) c.type = KvType::F32;
    else if (key.dtype().code == uint8_t(nb::dlpack::dtype_code::Float) && key.dtype().bits == 16) c.type = KvType::F16;
    else if (key.dtype() == nb::dtype<int8_t>()) c.type = KvType::I8;
    else throw std::invalid_argument("KV blocks must be float32, float16 or int8");
    require(c.head_dim <= kMaxHeadDim, "heads of more than 512 dimensions are not supported");
    require((c.type == KvType::I8) == scales.has_value(), "int8 blocks, and no others, have scales");
    c.key = key.data();
    c.value = value.data();
    c.key_stride = key.stride(0);
    c.value_stride = value.stride(0);
    if (scales) {
        require_packed(*scales, "scale");
        require(scales->dtype() == nb::dtype<float>() && scales->shape(0) == key.shape(0) &&
                    scales->shape(1) == key.shape(1) && scales->shape(2) == 2 && scales->shape(3) == key.shape(3),
                "scales must be float32 [block, kv_head, 2, token]");
        c.scales = static_cast<float*>(scales->data());
        c.scale_stride = scales->stride(0);
    }
    return c;
}

std::shared_ptr<Op> make_rope(const Matrix& qkv, const Ints& positions, const Matrix& cos_sin, int num_heads,
                              const StepView& step, const CacheView& cache, const std::optional<Vector>& q_norm,
                              const std::optional<Vector>& k_norm, float eps, const Matrix& out) {
    const size_t dim = size_t(cache.head_dim);
    require_shape(qkv, qkv.shape(0), (size_t(num_heads) + 2 * size_t(cache.num_kv_heads)) * dim, "qkv");
    require_shape(out, qkv.shape(0), size_t(num_heads) * dim, "out");
    require(positions.shape(0) >= qkv.shape(0), "positions are fewer than rows");
    require(cos_sin.shape(1) <= dim && cos_sin.shape(1) % 2 == 0, "cos_sin is wider than a head");
    auto op = std::make_shared<RopeOp>();
    op->room = room_for(Rows::Tokens, std::min(qkv.shape(0), size_t(step.max_tokens)));
    op->qkv = qkv.data();
    op->num_heads = num_heads;
    op->rotary_dim = int(cos_sin.shape(1));
    op->max_position = int(cos_sin.shape(0));
    op->positions = positions.data();
    op->cos_sin = cos_sin.data();
    if (q_norm) {
        op->full_norm = q_norm->shape(0) != dim;
        require(k_norm.has_value(), "norms of q and k come together");
        require_length(*q_norm, op->full_norm ? dim * size_t(num_heads) : dim, "q_norm");
        require_length(*k_norm, op->full_norm ? dim * size_t(cache.num_kv_heads) : dim, "k_norm");
        op->q_norm = q_norm->data();
        op->k_norm = k_norm->data();
        op->norm_eps = eps;
    }
    op->step = step;
    op->cache = cache;
    op->q_out = out.data();
    return op;
}

std::shared_ptr<Op> make_attention(const Matrix& q, int num_heads, float scale, int window, int chunk, float softcap,
                                   const std::optional<Vector>& sinks, bool exact, const StepView& step,
                                   const CacheView& cache, const Matrix& out) {
    require(scale > 0, "scale must be positive");
    require(num_heads > 0 && num_heads % cache.num_kv_heads == 0, "query heads must be a multiple of the kv heads");
    require_shape(q, q.shape(0), size_t(num_heads) * size_t(cache.head_dim), "q");
    require_shape(out, q.shape(0), q.shape(1), "out");
    if (sinks) require_length(*sinks, size_t(num_heads), "sinks");
    auto op = std::make_shared<AttentionOp>();
    op->room = room_for(Rows::Tokens, q.shape(0));
    op->room.reqs = step.max_reqs;
    op->q = q.data();
    op->num_heads = num_heads;
    op->exact = exact;
    op->window = window;
    op->chunk = chunk;
    op->scale = scale;
    op->softcap = softcap;
    op->sinks = sinks ? sinks->data() : nullptr;
    op->step = step;
    op->cache = cache;
    op->out = out.data();
    return op;
}

std::shared_ptr<Op> make_moe(const Matrix& x, std::shared_ptr<Weight> router, std::vector<std::shared_ptr<Weight>> gate_up,
                             std::vector<std::shared_ptr<Weight>> down, int top_k, const std::string& activation,
                             bool renormalize, bool exact, const Matrix& out) {
    require_shape(out, x.shape(0), x.shape(1), "out");
    require(!gate_up.empty() && gate_up.size() == down.size() && size_t(router->out_features) == gate_up.size(),
            "the router must have one row per expert");
    require(top_k >= 1 && size_t(top_k) <= gate_up.size(), "top_k must be between 1 and the number of experts");
    auto op = std::make_shared<MoeOp>();
    op->room = room_for(Rows::Tokens, x.shape(0));
    op->exact = exact;
    for (size_t e = 0; e < gate_up.size(); ++e) {
        const Weight &in = *gate_up[e], &back = *down[e];
        require(in.segments.size() == 2 && in.in_features == int(x.shape(1)) && back.segments.size() == 1 &&
                    back.out_features == int(x.shape(1)) && back.in_features == in.segments[0].rows &&
                    in.segments[0].rows == in.segments[1].rows && in.out_features == gate_up[0]->out_features,
                "experts must have equal shapes that fit x");
        op->exact = op->exact || !in.quantized() || !back.quantized();
    }
    op->router.input = make_input(x, *router, Rows::Tokens, exact);
    op->router.weight = std::move(router);
    op->gate_up = std::move(gate_up);
    op->down = std::move(down);
    op->top_k = top_k;
    op->activation = parse_activation(activation);
    op->renormalize = renormalize;
    op->out = out.data();
    return op;
}

std::shared_ptr<Op> make_arg_max(const Matrix& x, const Ints& out) {
    require(out.shape(0) == x.shape(0) && x.shape(1) > 0, "one result per row");
    auto op = std::make_shared<ArgMaxOp>();
    op->room = room_for(Rows::Logits, x.shape(0));
    op->width = int(x.shape(1));
    op->x = x.data();
    op->out = out.data();
    return op;
}

}  // namespace

// An array argument: of the right type and layout already, since an op keeps its address and not a converted copy's.
static constexpr auto array(const char* name) { return nb::arg(name).noconvert(); }

void bind_sampling(nb::module_& m);  // bindings_sampling.cpp

NB_MODULE(_native, m) {
    nb::enum_<Rows>(m, "Rows").value("TOKENS", Rows::Tokens).value("LOGITS", Rows::Logits);

    nb::class_<Weight>(m, "Weight")
        .def_ro("out_features", &Weight::out_features)
        .def_ro("in_features", &Weight::in_features)
        .def_ro("num_bytes", &Weight::num_bytes)
        .def_prop_ro("format", &Weight::format)
        .def_prop_ro("quantized", &Weight::quantized)
        .def_prop_ro("pieces", &get_pieces);

    nb::class_<Op>(m, "Op").def_prop_ro("name", &Op::name);
    nb::class_<StepView>(m, "StepView");
    nb::class_<CacheView>(m, "CacheView");

    nb::class_<Team>(m, "Team")
        .def("__init__", [](Team* self, int num_threads, const std::string& isa) {
            require(num_threads >= 1 && num_threads <= 1024, "a team has 1 to 1024 threads");
            new (self) Team(num_threads, find_kernels(isa));
        }, nb::arg("num_threads"), nb::arg("isa") = "")
        .def_prop_ro("num_threads", &Team::size)
        .def_prop_ro("isa", [](const Team& t) { return t.kernels().name; })
        .def("set_progress", [](Team& t, uint64_t address) { t.set_progress(reinterpret_cast<uint64_t*>(address)); },
             nb::arg("address"))
        .def("run", [](Team& t, const Op& op, int tokens, int reqs, int logit_rows, int best_rows) {
            run_op(t, op, {tokens, reqs, logit_rows, best_rows});
        }, nb::call_guard<nb::gil_scoped_release>(), nb::arg("op"), nb::arg("tokens") = 0, nb::arg("reqs") = 0,
           nb::arg("logit_rows") = 0, nb::arg("best_rows") = 0);

    nb::class_<Plan>(m, "Plan")
        .def("__init__", [](Plan* self, int tokens, int reqs, int logit_rows) { new (self) Plan({tokens, reqs, logit_rows}); },
             nb::arg("tokens"), nb::arg("reqs"), nb::arg("logit_rows"))
        .def("append", &Plan::append, nb::arg("op"))
        .def("finish", [](Plan& p, Team& team, const std::vector<uint64_t>& kept) {
            std::vector<const void*> pointers;
            for (uint64_t address : kept) pointers.push_back(reinterpret_cast<const void*>(address));
            p.finish(team, pointers);
        }, nb::arg("team"), nb::arg("kept"))
        .def("replay", [](const Plan& p, Team& team, int tokens, int reqs, int logit_rows, int best_rows) {
            p.replay(team, {tokens, reqs, logit_rows, best_rows});
        }, nb::call_guard<nb::gil_scoped_release>(), nb::arg("team"), nb::arg("tokens"), nb::arg("reqs"),
           nb::arg("logit_rows") = 0, nb::arg("best_rows") = 0)
        .def("profile", [](const Plan& p, Team& team, int tokens, int reqs, int logit_rows) {
            return p.profile(team, {tokens, reqs, logit_rows});
        }, nb::arg("team"), nb::arg("tokens"), nb::arg("reqs"), nb::arg("logit_rows") = 0)
        .def_prop_ro("op_names", [](const Plan& p) {
            std::vector<std::string> names;
            for (const char* name : p.op_names()) names.emplace_back(name);
            return names;
        });

    m.def("isas", [] {
        std::vector<std::string> names;
        for (const Kernels* k : available_kernels()) names.emplace_back(k->name);
        return names;
    });
    m.def("is_packable", [](const std::string& format) { return find_file_format(format) != nullptr; }, nb::arg("format"));
    m.def("pack", &pack, nb::arg("team"), nb::arg("parts"), nb::arg("in_features"), nb::arg("quantize") = "",
          nb::arg("gated") = false);
    m.def("adopt", &adopt, nb::arg("team"), nb::arg("forms"), nb::arg("in_features"), nb::arg("quantize"),
          nb::arg("gated"), nb::arg("pieces"));
    m.def("hash_bytes", [](const Stretch& bytes) {
        nb::gil_scoped_release release;
        return hash_bytes(bytes.data(), bytes.size());
    }, nb::arg("bytes"));
    m.def("embedding", &make_embedding, array("ids"), nb::arg("table"), nb::arg("scale"), array("out"));
    m.def("norm", &make_norm, array("x"), array("residual").none(), array("weight"), nb::arg("eps"), array("out"),
          array("sum_out").none(), nb::arg("rows"));
    m.def("add", &make_add, array("x"), array("y"), array("out"), nb::arg("rows"));
    m.def("gather", &make_gather, array("x"), array("index"), array("out"));
    m.def("linear", &make_linear, array("x"), array("weight"), array("bias").none(), nb::arg("softcap"),
          nb::arg("exact"), array("out"), nb::arg("rows"));
    m.def("head", &make_head, array("x"), array("weight"), nb::arg("softcap"), nb::arg("exact"), array("best"),
          array("peaks"), array("logits"));
    m.def("gated", &make_gated, array("x"), array("weight"), nb::arg("activation"), nb::arg("exact"), array("out"),
          nb::arg("rows"));
    m.def("step", &make_step, array("query_start_loc"), array("seq_lens"), array("block_table"),
          array("slot_mapping"));
    m.def("cache", &make_cache, array("key"), array("value"), array("scales").none());
    m.def("rope", &make_rope, array("qkv"), array("positions"), array("cos_sin"), nb::arg("num_heads"),
          nb::arg("step"), nb::arg("cache"), array("q_norm").none(), array("k_norm").none(), nb::arg("eps"),
          array("out"));
    m.def("attention", &make_attention, array("q"), nb::arg("num_heads"), nb::arg("scale"), nb::arg("window"),
          nb::arg("chunk"), nb::arg("softcap"), array("sinks").none(), nb::arg("exact"), nb::arg("step"), nb::arg("cache"),
          array("out"));
    m.def("moe", &make_moe, array("x"), nb::arg("router"), nb::arg("gate_up"), nb::arg("down"), nb::arg("top_k"),
          nb::arg("activation"), nb::arg("renormalize"), nb::arg("exact"), array("out"));
    m.def("arg_max", &make_arg_max, array("x"), array("out"));
    bind_sampling(m);
}
