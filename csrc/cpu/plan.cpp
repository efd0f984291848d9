#include "plan.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace headrace {

namespace {

bool contains(const std::vector<const void*>& list, const void* p) { return std::find(list.begin(), list.end(), p) != list.end(); }

ProductInput* product_input(Op* op) {
    if (auto* linear = dynamic_cast<LinearOp*>(op)) return &linear->input;
    if (auto* gated = dynamic_cast<GatedOp*>(op)) return &gated->input;
    return nullptr;
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

void Plan::finish(Team& team, const std::vector<const void*>& kept) {
    for (const auto& op : ops_) {
        const void* key = op->check_key();
        const bool known = std::any_of(checks_.begin(), checks_.end(), [&](const auto& other) {
            return other->check_key() == key && std::string(other->name()) == op->name();
        });
        if (key && !known) checks_.push_back(op);
    }
    fuse_norms(kept);
    fuse_gates(kept);
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

void Plan::replay(Team& team, const Sizes& sizes) const {
    check(sizes);
    team.run([&](int tid) {
        for (const auto& op : ops_) {
            op->run(team, tid, sizes);
            if (tid == 0) team.advance();
        }
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
