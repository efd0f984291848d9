#include "plan.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "products.h"

namespace headrace {

namespace {

constexpr int kLeastRows = 8;   // of a thread that takes rows through a part
constexpr int kMostRows = 64;   // at a time, of those
static_assert(kMostRows <= kRowBlock);

bool contains(const std::vector<const void*>& list, const void* p) { return std::find(list.begin(), list.end(), p) != list.end(); }

ProductInput* product_input(Op* op) {
    if (auto* linear = dynamic_cast<LinearOp*>(op)) return &linear->input;
    if (auto* gated = dynamic_cast<GatedOp*>(op)) return &gated->input;
    return nullptr;
}

// Rows that a thread takes through a part at a time, or 0 when threads should rather share each op. Every thread then reads
// all weights: its rows must be so many that multiplying takes longer than reading, however many threads read at once.
int rows_per_thread(int rows, int threads) {
    const int least = std::max(kLeastRows, 4 * threads);
    if (threads == 1 || rows < least * threads) return 0;
    const int pieces = (rows + threads * kMostRows - 1) / (threads * kMostRows) * threads;
    return (rows + pieces - 1) / pieces;
}

}  // namespace

// Index of the one op that reads what `writer` put into `buffer`, or -1.
int Plan::only_reader(size_t writer, const void* buffer, const std::vector<const void*>& kept) const {
    int reader = -1;
    for (size_t i = writer + 1; i < ops_.size(); ++i) {
        if (contains(ops_[i]->reads(), buffer)) {
            if (reader >= 0) return -1;
            reader = int(i);
        }
        if (contains(ops_[i]->writes(), buffer)) return reader;
    }
    return contains(kept, buffer) ? -1 : reader;
}

void Plan::fuse_norms(const std::vector<const void*>& kept) {
    for (size_t i = 0; i + 1 < ops_.size(); ++i) {
        auto norm = std::dynamic_pointer_cast<NormOp>(ops_[i]);
        if (!norm || only_reader(i, norm->out, kept) != int(i + 1)) continue;
        ProductInput* input = product_input(ops_[i + 1].get());
        if (!input || input->exact || input->x != norm->out) continue;
        input->norm = norm;
        ops_.erase(ops_.begin() + long(i));
    }
}

void Plan::fuse_gates(const std::vector<const void*>& kept) {
    for (size_t i = 0; i + 1 < ops_.size(); ++i) {
        auto* gated = dynamic_cast<GatedOp*>(ops_[i].get());
        auto* linear = dynamic_cast<LinearOp*>(ops_[i + 1].get());
        if (!gated || !linear || linear->input.exact || linear->input.x != gated->out) continue;
        if (only_reader(i, gated->out, kept) != int(i + 1)) continue;
        gated->quantized_out = true;
        linear->input.ready = true;
    }
}

void Plan::find_parts() {
    for (size_t i = 0; i < ops_.size(); ++i) {
        const auto* op = dynamic_cast<const RowOp*>(ops_[i].get());
        const bool by_rows = op && op->rows_of() == Rows::Tokens && !op->keeps_rows_together();
        if (by_rows && !parts_.empty() && parts_.back().by_rows) ++parts_.back().end;
        else parts_.push_back({i, i + 1, by_rows});
    }
}

void Plan::finish(Team& team, const std::vector<const void*>& kept) {
    for (const auto& op : ops_) {
        op->check_room(most_);
        const std::vector<int64_t> key = op->check_key();
        const bool known = std::any_of(checks_.begin(), checks_.end(), [&](const auto& other) {
            return other->check_key() == key && std::string(other->name()) == op->name();
        });
        if (!key.empty() && !known) checks_.push_back(op);
    }
    fuse_norms(kept);
    fuse_gates(kept);
    find_parts();
    for (const auto& op : ops_) op->reserve(team, most_);
}

void Plan::check(const Sizes& sizes) const {
    if (sizes.tokens < 0 || sizes.tokens > most_.tokens || sizes.reqs < 0 || sizes.reqs > most_.reqs ||
        sizes.logit_rows < 0 || sizes.logit_rows > most_.logit_rows)
        throw std::out_of_range("a step of " + std::to_string(sizes.tokens) + " tokens, " + std::to_string(sizes.reqs) +
                                " requests and " + std::to_string(sizes.logit_rows) +
                                " rows of logits is larger than the captured plan");
    for (const auto& op : checks_) op->check(sizes);
}

void Plan::run_part(Team& team, int tid, const Part& part, const Sizes& sizes) const {
    const int step = part.by_rows ? rows_per_thread(sizes.tokens, team.size()) : 0;
    if (step == 0) {
        for (size_t i = part.begin; i < part.end; ++i) {
            ops_[i]->run(team, tid, sizes);
            if (tid == 0) team.advance();
        }
        return;
    }
    team.for_each(tid, (sizes.tokens + step - 1) / step, [&](int64_t piece) {
        const int begin = int(piece) * step, end = std::min(sizes.tokens, begin + step);
        for (size_t i = part.begin; i < part.end; ++i) {
            static_cast<const RowOp&>(*ops_[i]).run_rows(team, tid, begin, end);
            if (piece == 0) team.advance();
        }
    });
}

void Plan::replay(Team& team, const Sizes& sizes) const {
    check(sizes);
    team.run([&](int tid) {
        for (const Part& part : parts_) run_part(team, tid, part, sizes);
    });
}

std::vector<double> Plan::profile(Team& team, const Sizes& sizes) const {
    using Clock = std::chrono::steady_clock;
    check(sizes);
    std::vector<double> seconds(ops_.size());
    team.run([&](int tid) {
        Clock::time_point began = Clock::now();
        for (size_t i = 0; i < ops_.size(); ++i) {
            ops_[i]->run(team, tid, sizes);
            if (tid != 0) continue;
            const Clock::time_point ended = Clock::now();
            seconds[i] = std::chrono::duration<double>(ended - began).count();
            began = ended;
            team.advance();
        }
    });
    return seconds;
}

std::vector<const char*> Plan::op_names() const {
    std::vector<const char*> names;
    for (const auto& op : ops_) names.push_back(op->name());
    return names;
}

}  // namespace headrace
