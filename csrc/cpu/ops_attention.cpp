// Rotary embedding with the store to the cache, and paged attention.

#include <algorithm>
#include <stdexcept>

#include "ops.h"

namespace headrace {

constexpr int kMostHeads = 8;  // query heads of one kv head in a task

// How query heads are shared by the tasks of one place: `kv_heads` kv heads with `heads` query heads each, or one kv head's
// query heads in `parts` parts when they are too many for a task.
struct HeadCut {
    int kv_heads, heads, parts;
    HeadCut(int group, int num_kv_heads, bool one_row) {
        parts = 1;
        while ((group + parts - 1) / parts > kMostHeads) ++parts;
        heads = (group + parts - 1) / parts;
        kv_heads = one_row && parts == 1 ? std::min(num_kv_heads, 3 * kMostHeads / heads) : 1;
    }
    int tasks(int num_kv_heads) const { return (num_kv_heads + kv_heads - 1) / kv_heads * parts; }
};

namespace {

constexpr int kMostPartials = 1 << 18;  // floats kept for split attention

int first_visible(int position, int window, int chunk) {
    int lo = window > 0 ? std::max(0, position - window + 1) : 0;
    if (chunk > 0) lo = std::max(lo, position / chunk * chunk);
    return lo;
}

}  // namespace

void RopeOp::check(const Sizes& sizes) const {
    const int64_t slots = int64_t(cache.num_blocks) * cache.block_size;
    for (int t = 0; t < sizes.tokens; ++t) {
        if (step.slot_mapping[t] < -1 || step.slot_mapping[t] >= slots)
            throw std::out_of_range("slot " + std::to_string(step.slot_mapping[t]) + " of token " + std::to_string(t) +
                                    " is outside the cache of " + std::to_string(slots));
        if (positions[t] < 0 || positions[t] >= max_position)
            throw std::out_of_range("position " + std::to_string(positions[t]) + " of token " + std::to_string(t) +
                                    " is outside the rotary table of " + std::to_string(max_position));
    }
}

std::vector<int64_t> RopeOp::check_key() const {
    return {address(step.slot_mapping), int64_t(cache.num_blocks) * cache.block_size, address(positions), max_position};
}

void RopeOp::run(Team& team, int tid, const Sizes& sizes) const {
    const int step_rows = std::clamp(sizes.tokens / (team.size() * 4), 1, 16);
    team.for_each(tid, (sizes.tokens + step_rows - 1) / step_rows, [&](int64_t piece) {
        run_rows(team, tid, int(piece) * step_rows, std::min(sizes.tokens, (int(piece) + 1) * step_rows));
    });
}

void RopeOp::run_rows(Team& team, int, int begin, int end) const {
    const int width = (num_heads + 2 * cache.num_kv_heads) * cache.head_dim;
    for (int t = begin; t < end; ++t) {
        RopeTask task{};
        task.qkv = qkv + int64_t(t) * width;
        task.num_heads = num_heads;
        task.num_kv_heads = cache.num_kv_heads;
        task.head_dim = cache.head_dim;
        task.rotary_dim = rotary_dim;
        task.cos_sin = cos_sin + int64_t(positions[t]) * rotary_dim;
        task.q_norm = q_norm;
        task.k_norm = k_norm;
        task.full_norm = full_norm;
        task.norm_eps = norm_eps;
        task.q_out = q_out + int64_t(t) * num_heads * cache.head_dim;
        task.kv_type = cache.type;
        task.block_size = cache.block_size;
        const int64_t slot = step.slot_mapping[t];
        if (slot >= 0) {
            const int64_t block = slot / cache.block_size;
            task.offset = int(slot % cache.block_size);
            task.key = static_cast<char*>(cache.key) + block * cache.key_stride * int64_t(cache.element());
            task.value = static_cast<char*>(cache.value) + block * cache.value_stride * int64_t(cache.element());
            task.scales = cache.scales ? cache.scales + block * cache.scale_stride : nullptr;
        }
        team.kernels().rope_store(task);
    }
}

void AttentionOp::check(const Sizes& sizes) const {
    if (sizes.reqs > step.max_reqs) throw std::out_of_range("more requests than the step's buffers hold");
    const int32_t* start = step.query_start_loc;
    if (start[0] != 0 || start[sizes.reqs] != sizes.tokens)
        throw std::out_of_range("query_start_loc does not cover the step's " + std::to_string(sizes.tokens) + " tokens");
    for (int r = 0; r < sizes.reqs; ++r) {
        const int queries = start[r + 1] - start[r], length = step.seq_lens[r];
        if (queries < 0 || length < queries || length > int64_t(step.max_blocks) * cache.block_size)
            throw std::out_of_range("request " + std::to_string(r) + " has " + std::to_string(queries) + " new tokens and " +
                                    std::to_string(length) + " in all, more than its block table or its length allow");
        const int lo = first_visible(length - queries, window, chunk) / cache.block_size;
        for (int b = lo; b < (length + cache.block_size - 1) / cache.block_size; ++b) {
            const int32_t block = step.block_table[r * step.table_stride + b];
            if (block < 0 || block >= cache.num_blocks)
                throw std::out_of_range("block " + std::to_string(block) + " of request " + std::to_string(r) +
                                        " is outside the cache of " + std::to_string(cache.num_blocks));
        }
    }
}

std::vector<int64_t> AttentionOp::check_key() const {
    return {address(step.query_start_loc), address(step.seq_lens), address(step.block_table), step.table_stride, step.max_blocks,
            step.max_reqs, cache.num_blocks, cache.block_size, window, chunk};
}

void AttentionOp::reserve(Team& team, const Sizes& most) const {
    team.reserve_scratch(attend_scratch_floats(cache.head_dim));
    team.reserve_shared(Shared::Partials, kMostPartials * sizeof(float));
    team.reserve_index(size_t(most.reqs) + 1);
}

AttendTask AttentionOp::task(int req, int first_row, int num_rows, const HeadCut& cut, int index) const {
    const int group = num_heads / cache.num_kv_heads;
    const int kv_head = index / cut.parts * cut.kv_heads, head = index % cut.parts * cut.heads;
    const int start = step.query_start_loc[req], queries = step.query_start_loc[req + 1] - start;
    const int64_t ld = int64_t(num_heads) * cache.head_dim;
    const int64_t at = int64_t(start + first_row) * ld + int64_t(kv_head * group + head) * cache.head_dim;
    AttendTask t{};
    t.q = q + at;
    t.ldq = ld;
    t.num_rows = num_rows;
    t.group = std::min(cut.heads, group - head);
    t.head_dim = cache.head_dim;
    t.first_position = step.seq_lens[req] - queries + first_row;
    t.exact = exact;
    t.scale = scale;
    t.softcap = softcap;
    t.window = window;
    t.chunk = chunk;
    t.sinks = sinks ? sinks + kv_head * group + head : nullptr;
    t.kv_type = cache.type;
    t.key = cache.key;
    t.value = cache.value;
    t.scales = cache.scales;
    t.key_stride = cache.key_stride;
    t.value_stride = cache.value_stride;
    t.scale_stride = cache.scale_stride;
    t.blocks = step.block_table + req * step.table_stride;
    t.block_size = cache.block_size;
    t.kv_head = kv_head;
    t.num_kv_heads = std::min(cut.kv_heads, cache.num_kv_heads - kv_head);
    t.range_begin = first_visible(t.first_position, window, chunk) / kRange;
    t.range_end = (t.first_position + num_rows - 1) / kRange + 1;
    t.out = out + at;
    t.ldo = ld;
    return t;
}

void AttentionOp::run(Team& team, int tid, const Sizes& sizes) const {
    // Few requests of one token each leave threads idle unless they share ranges, and so does one that is longer than all others.
    const HeadCut cut(num_heads / cache.num_kv_heads, cache.num_kv_heads, true);
    const int64_t tasks = int64_t(sizes.reqs) * cut.tasks(cache.num_kv_heads);
    bool split = sizes.tokens == sizes.reqs && team.size() > 1 && tasks < 8 * team.size();
    int64_t ranges = 0, all = 0;
    for (int r = 0; split && r < sizes.reqs; ++r) {
        split = step.query_start_loc[r + 1] == r + 1;
        const int64_t own = step.seq_lens[r] / kRange + 1;
        ranges = std::max(ranges, own);
        all += own;
    }
    split = split && (tasks < 4 * team.size() || ranges * team.size() > all);
    if (split && sizes.reqs * ranges * num_heads * (cache.head_dim + 2) <= kMostPartials && ranges > 1)
        run_split(team, tid, sizes);
    else run_whole(team, tid, sizes);
}

void AttentionOp::run_whole(Team& team, int tid, const Sizes& sizes) const {
    const int group = num_heads / cache.num_kv_heads;
    const HeadCut one(group, cache.num_kv_heads, true), many(group, cache.num_kv_heads, false);
    // Many rows share the widening of keys and values; few leave no thread idle at the end.
    const int share = int(int64_t(sizes.tokens) * many.tasks(cache.num_kv_heads) / (8 * team.size()));
    const int rows_per_task = std::clamp(share / 4 * 4, 4, kMaxPairs / many.heads);
    // Every thread counts for itself: cheaper than waiting for one that does.
    auto* first_unit = team.index(tid);
    first_unit[0] = 0;
    for (int r = 0; r < sizes.reqs; ++r) {
        const int queries = step.query_start_loc[r + 1] - step.query_start_loc[r];
        const int tiles = (queries + rows_per_task - 1) / rows_per_task;
        first_unit[r + 1] = first_unit[r] + tiles * (queries == 1 ? one : many).tasks(cache.num_kv_heads);
    }
    const int64_t units = first_unit[sizes.reqs];
    // The last rows of a prompt take longest. They come first, dealt to the threads in turn.
    const auto task_of = [&](int64_t i) {
        const int64_t unit = units - 1 - team.deal(i, units);
        const int req = int(std::upper_bound(first_unit, first_unit + sizes.reqs + 1, unit) - first_unit) - 1;
        const int queries = step.query_start_loc[req + 1] - step.query_start_loc[req];
        const HeadCut& cut = queries == 1 ? one : many;
        const int tasks = cut.tasks(cache.num_kv_heads), in_req = int(unit - first_unit[req]);
        const int first = in_req / tasks * rows_per_task;
        return task(req, first, std::min(rows_per_task, queries - first), cut, in_req % tasks);
    };
    team.for_each(tid, units, [&](int64_t i) {
        AttendTask t = task_of(i), next;
        if (t.num_rows == 1 && i + 1 < units) {
            next = task_of(i + 1);
            t.next = &next;
        }
        t.scratch = team.scratch(tid);
        team.kernels().attend(t);
    });
}

void AttentionOp::run_split(Team& team, int tid, const Sizes& sizes) const {
    const HeadCut cut(num_heads / cache.num_kv_heads, cache.num_kv_heads, true);
    const int tasks = cut.tasks(cache.num_kv_heads);
    int most = 0;
    for (int r = 0; r < sizes.reqs; ++r) most = std::max(most, (step.seq_lens[r] - 1) / kRange + 1);
    const int pieces = std::min(most, (team.size() * 4 + tasks * sizes.reqs - 1) / (tasks * sizes.reqs));
    const int64_t partial = cache.head_dim + 2, range_stride = num_heads * partial, req_stride = most * range_stride;
    auto* partials = team.shared<float>(Shared::Partials);
    const int64_t units = int64_t(sizes.reqs) * tasks * pieces;
    const auto task_of = [&](int64_t i) {
        const int piece = int(i % pieces), index = int(i / pieces % tasks), req = int(i / pieces / tasks);
        AttendTask t = task(req, 0, 1, cut, index);
        const int begin = t.range_begin, ranges = t.range_end - begin;
        const int64_t head = (t.q - q) / cache.head_dim % num_heads;
        t.range_begin = begin + ranges * piece / pieces;
        t.range_end = begin + ranges * (piece + 1) / pieces;
        t.partials = partials + req * req_stride + head * partial;
        t.partial_stride = range_stride;
        return t;
    };
    team.for_each(tid, units, [&](int64_t i) {
        AttendTask t = task_of(i), next;
        if (t.range_begin == t.range_end) return;
        if (i + 1 < units) {
            next = task_of(i + 1);
            if (next.range_begin < next.range_end) t.next = &next;
        }
        t.scratch = team.scratch(tid);
        team.kernels().attend(t);
    });
    const int all = sizes.reqs * num_heads, step_heads = std::max(1, all / (team.size() * 2));
    team.for_each(tid, (all + step_heads - 1) / step_heads, [&](int64_t piece) {
        for (int i = int(piece) * step_heads; i < std::min(all, (int(piece) + 1) * step_heads); ++i) {
            const int req = i / num_heads, head = i % num_heads, position = step.seq_lens[req] - 1;
            const int begin = first_visible(position, window, chunk) / kRange;
            team.kernels().merge_partials(exact, partials + req * req_stride + begin * range_stride + head * partial,
                                          position / kRange + 1 - begin, range_stride, cache.head_dim,
                                          sinks ? sinks + head : nullptr,
                                          out + (int64_t(req) * num_heads + head) * cache.head_dim);
        }
    });
}

}  // namespace headrace
