// A captured step: ops in order, replayed without Python.
//
// `finish` fuses across the borders of ops where an intermediate has one reader: a norm into the product that reads it, a
// gate's result straight into the quantised input of the next product. The float program stays the same, so replay and
// eager calls give the same bits.
//
// Ops between two attentions do not mix rows. In a step of many rows a thread takes some of them through all of these ops,
// alone: little travels between cores, and nobody waits for one that the system has displaced until the next attention. In a
// step of few rows all threads share every op, so that weights are read once.
#pragma once

#include <memory>
#include <vector>

#include "ops.h"

namespace headrace {

class Plan {
public:
    explicit Plan(Sizes most) : most_(most) {}

    void append(std::shared_ptr<Op> op) { ops_.push_back(std::move(op)); }
    // `kept` are buffers that somebody reads after a replay. Throws std::out_of_range where an op has no room for it.
    void finish(Team& team, const std::vector<const void*>& kept);
    // Throws std::out_of_range before anything has run. Sizes must not exceed those of the capture.
    void replay(Team& team, const Sizes& sizes) const;
    std::vector<const char*> op_names() const;
    // A replay with the seconds of each op, in order.
    std::vector<double> profile(Team& team, const Sizes& sizes) const;

private:
    // Ops [begin, end): those that do not mix rows, or a single other one.
    struct Part {
        size_t begin, end;
        bool by_rows;
    };

    void check(const Sizes& sizes) const;
    void run_part(Team& team, int tid, const Part& part, const Sizes& sizes) const;
    int only_reader(size_t writer, const void* buffer, const std::vector<const void*>& kept) const;
    void fuse_norms(const std::vector<const void*>& kept);
    void fuse_gates(const std::vector<const void*>& kept);
    void find_parts();

    Sizes most_;
    std::vector<std::shared_ptr<Op>> ops_;
    std::vector<std::shared_ptr<Op>> checks_;
    std::vector<Part> parts_;
};

}  // namespace headrace
