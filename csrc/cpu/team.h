// The persistent thread team that runs ops.
//
// `run(body)` calls body(tid) on every thread; the caller is thread 0. Inside, `for_each` hands out pieces of work and ends
// with a barrier: each thread takes its own stretch of pieces from the front, so that it reads memory in one stream, then
// takes from the back of the others'. A thread that the system has displaced holds up at most the piece that it works on,
// even if it has not begun. Waiting spins for a bounded time and then sleeps on a futex, at once if another thread of the team
// was last seen on the same core: it may need just this one. One run at a time; nothing is
// allocated while running.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/table.h"

namespace headrace {

// Cache-line aligned memory that grows on demand and keeps no content when it does.
class Buffer {
public:
    void reserve(size_t bytes);
    template <class T> T* as() const { return reinterpret_cast<T*>(data_.get()); }
    size_t size() const { return size_; }

private:
    struct Free {
        void operator()(std::byte* p) const;
    };
    std::unique_ptr<std::byte, Free> data_;
    size_t size_ = 0;
};

// Buffers that all threads of a run share, by purpose.
enum class Shared : int { Activations, GatedActivations, Partials, Units, Moe, MoeActivations, MoeHidden, MoeIndex, Count };

class Team {
public:
    Team(int num_threads, const Kernels& kernels);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }
    const Kernels& kernels() const { return kernels_; }

    template <class F> void run(F&& body) {
        std::lock_guard lock(running_);
        if (size_ > 1) start([](void* f, int tid) { (*static_cast<std::remove_reference_t<F>*>(f))(tid); }, &body);
        body(0);
        if (size_ > 1) finish();
    }

    // Pieces 0..n-1, each to one thread; returns on every thread when all are done.
    template <class F> void for_each(int tid, int64_t n, F&& piece) {
        if (size_ == 1) {
            for (int64_t i = 0; i < n; ++i) piece(i);
            return;
        }
        const uint64_t epoch = ++stretches_[tid].epoch & 0xffff;
        int64_t i;
        while ((i = take(tid, epoch, n, true)) >= 0) piece(i);
        for (int other = 1; other < size_; ++other)
            while ((i = take((tid + other) % size_, epoch, n, false)) >= 0) piece(i);
        barrier(tid);
    }

    void barrier(int tid);

    // Only between runs.
    void reserve_shared(Shared which, size_t bytes) { shared_[int(which)].reserve(bytes); }
    void reserve_scratch(size_t floats);
    template <class T> T* shared(Shared which) const { return shared_[int(which)].as<T>(); }
    float* scratch(int tid) const { return scratch_[tid].as<float>(); }

    // A word to advance after each op, or null.
    void set_progress(uint64_t* word) { progress_ = word; }
    void advance() {
        if (progress_) std::atomic_ref(*progress_).fetch_add(1, std::memory_order_relaxed);
    }

private:
    using Body = void (*)(void*, int);

    // What is left of a thread's pieces, in one word: epoch (16 bits), first (24), end (24). Whoever comes first in an epoch
    // fills it in.
    struct alignas(64) Stretch {
        std::atomic<uint64_t> left{0};
        uint64_t epoch = 0;  // of this thread, counted alike by all
        std::atomic<int> core{-1};  // where it reached its last barrier
    };
    int64_t take(int owner, uint64_t epoch, int64_t n, bool from_front);

    int spins(int tid) const;
    void start(Body body, void* argument);
    void finish();
    void work(int tid);

    const int size_;
    const Kernels& kernels_;
    Buffer shared_[int(Shared::Count)];
    std::vector<Buffer> scratch_;
    uint64_t* progress_ = nullptr;
    std::mutex running_;
    Body body_ = nullptr;
    void* argument_ = nullptr;
    bool stopping_ = false;

    std::vector<Stretch> stretches_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<uint32_t> job_{0};
    std::vector<std::thread> threads_;
};

}  // namespace headrace
