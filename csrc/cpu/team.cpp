#include "team.h"

#include <sched.h>

#include <cstdlib>
#include <new>

namespace headrace {

namespace {

// About 50 microseconds: longer than any wait inside a healthy step, far shorter than a time slice.
constexpr int kSpins = 2000;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits until `word` is no longer `old`.
void wait_change(const std::atomic<uint32_t>& word, uint32_t old, std::atomic<int>& sleepers, int spins) {
    for (int i = 0; i < spins; ++i) {
        if (word.load(std::memory_order_acquire) != old) return;
        relax();
    }
    sleepers.fetch_add(1);
    while (word.load() == old) word.wait(old);
    sleepers.fetch_sub(1);
}

}  // namespace

void Buffer::Free::operator()(std::byte* p) const { std::free(p); }

void Buffer::reserve(size_t bytes) {
    if (bytes <= size_) return;
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    auto* fresh = static_cast<std::byte*>(std::aligned_alloc(4096, rounded));
    if (!fresh) throw std::bad_alloc();
    data_.reset(fresh);
    size_ = rounded;
}

Team::Team(int num_threads, const Kernels& kernels)
    : size_(num_threads), kernels_(kernels), scratch_(size_t(num_threads)), stretches_(size_t(num_threads)) {
    for (int tid = 1; tid < size_; ++tid) threads_.emplace_back([this, tid] { work(tid); });
}

Team::~Team() {
    {
        std::lock_guard lock(running_);
        stopping_ = true;
        job_.fetch_add(1);
        job_.notify_all();
    }
    for (auto& thread : threads_) thread.join();
}

void Team::reserve_scratch(size_t floats) {
    for (auto& buffer : scratch_) buffer.reserve(floats * sizeof(float));
}

void Team::start(Body body, void* argument) {
    body_ = body;
    argument_ = argument;
    job_.fetch_add(1);
    if (sleepers_.load() > 0) job_.notify_all();
}

// The end of a run is a barrier too: nobody still touches the body or the pieces afterwards.
void Team::finish() { barrier(0); }

int Team::spins(int tid) const {
    const int here = stretches_[size_t(tid)].core.load(std::memory_order_relaxed);
    for (int other = 0; other < size_; ++other)
        if (other != tid && stretches_[size_t(other)].core.load(std::memory_order_relaxed) == here) return 0;
    return kSpins;
}

void Team::work(int tid) {
    uint32_t seen = 0;
    for (;;) {
        wait_change(job_, seen, sleepers_, spins(tid));
        seen = job_.load(std::memory_order_acquire);
        if (stopping_) return;
        body_(argument_, tid);
        barrier(tid);
    }
}

int64_t Team::take(int owner, uint64_t epoch, int64_t n, bool from_front) {
    constexpr uint64_t mask = (uint64_t(1) << 24) - 1;
    const auto bound = [&](int64_t t) { return uint64_t((n * t + size_ - 1) / size_); };
    std::atomic<uint64_t>& left = stretches_[size_t(owner)].left;
    uint64_t word = left.load(std::memory_order_relaxed);
    for (;;) {
        uint64_t first = word >> 24 & mask, end = word & mask;
        if (word >> 48 != epoch) {
            first = bound(owner);
            end = bound(owner + 1);
        }
        // Empty ones are written too: every word is of this epoch when it ends, and none can be taken for a later one.
        const bool empty = first >= end;
        if (empty && word >> 48 == epoch) return -1;
        const uint64_t piece = empty ? 0 : from_front ? first++ : --end;
        if (left.compare_exchange_weak(word, epoch << 48 | first << 24 | end, std::memory_order_relaxed))
            return empty ? -1 : int64_t(piece);
    }
}

void Team::barrier(int tid) {
    stretches_[size_t(tid)].core.store(sched_getcpu(), std::memory_order_relaxed);
    const uint32_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        arrived_.store(0, std::memory_order_relaxed);
        generation_.fetch_add(1);
        if (sleepers_.load() > 0) generation_.notify_all();
        return;
    }
    wait_change(generation_, generation, sleepers_, spins(tid));
}

}  // namespace headrace
