// The persistent thread team that runs ops.
//
// `run(body)` calls body(tid) on the threads of the team; the caller is thread 0. Inside, `for_each` hands out pieces of work:
// each thread takes its own stretch of pieces from the front, so that it reads memory in one stream, and then half of what
// another one has left as its new stretch. It returns when every piece is done, not when every thread has come: a thread
// that the system has displaced holds up at most the piece that it works on. When it runs again it finds that later calls are
// over and skips them, and one that had not even begun stays out of a run that has ended. So between two calls of `for_each`
// a body may read what stays the same for the whole run, and its thread's own scratch, but nothing that pieces write: that
// belongs into a piece. The number of pieces too must follow from what stays the same.
//
// Waiting spins for a bounded time and then sleeps on a futex, at once if another thread of the team was last seen on the
// same core: it may need just this one. One run at a time; nothing is allocated while running.
#pragma once

#include <array>
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

// A word that threads wait on: they spin for a bounded time and then sleep.
class Signal {
public:
    explicit Signal(uint32_t value) : word(value) {}
    std::atomic<uint32_t> word;

    // Returns when `fine` holds for the word.
    template <class F> void wait_until(int spins, F&& fine);
    // After a change of the word.
    void wake();

private:
    std::atomic<int> sleepers_{0};
};

// Buffers that all threads of a run share, by purpose.
enum class Shared : int { Activations, GatedActivations, Partials, Moe, MoeActivations, MoeHidden, MoeIndex, Best, Count };

// Buffers that each thread has for itself, by purpose.
enum class Own : int { Activations, GatedActivations, Count };

class Team {
public:
    Team(int num_threads, const Kernels& kernels);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }
    const Kernels& kernels() const { return kernels_; }

    // Some threads may not take part when the caller is done before they have begun.
    template <class F> void run(F&& body) {
        std::lock_guard lock(running_);
        if (size_ > 1) start([](void* f, int tid) { (*static_cast<std::remove_reference_t<F>*>(f))(tid); }, &body);
        body(0);
        if (size_ > 1) finish();
    }

    // Pieces 0..n-1, each on one thread; returns when all are done. At most kMostPieces, in at most kMostCalls of a run.
    template <class F> void for_each(int tid, int64_t n, F&& piece) {
        if (size_ == 1) {
            for (int64_t i = 0; i < n; ++i) piece(i);
            return;
        }
        const uint32_t call = ++threads_[size_t(tid)].call;
        if (closed_.word.load(std::memory_order_acquire) >= call) return;
        int64_t done = 0;
        for (int64_t i; (i = take(tid, call, n)) >= 0; ++done) piece(i);
        settle(tid, call, n, done);
    }

    // Counts pieces in the order in which the threads come to them, if all are equally fast: first the first ones of every
    // thread, then the second ones. For pieces of falling size.
    int64_t deal(int64_t piece, int64_t n) const {
        const int64_t thread = piece * size_ / n, first = bound(n, thread), nth = piece - first, least = n / size_;
        return nth * size_ + (nth < least ? thread : first - thread * least);
    }

    // Only between runs.
    void reserve_shared(Shared which, size_t bytes) { shared_[int(which)].reserve(bytes); }
    void reserve_own(Own which, size_t bytes);
    void reserve_scratch(size_t floats);
    void reserve_index(size_t entries);
    template <class T> T* shared(Shared which) const { return shared_[int(which)].as<T>(); }
    template <class T> T* own(int tid, Own which) const { return own_[size_t(tid)][size_t(which)].as<T>(); }
    float* scratch(int tid) const { return scratch_[size_t(tid)].as<float>(); }
    int64_t* index(int tid) const { return indices_[size_t(tid)].as<int64_t>(); }

    // A word to advance after each op, or null.
    void set_progress(uint64_t* word) { progress_ = word; }
    void advance() {
        if (progress_) std::atomic_ref(*progress_).fetch_add(1, std::memory_order_relaxed);
    }

private:
    using Body = void (*)(void*, int);

    static constexpr int kPieceBits = 22;
    static constexpr int64_t kMostPieces = (int64_t(1) << kPieceBits) - 1;
    static constexpr uint32_t kMostCalls = (uint32_t(1) << (64 - 2 * kPieceBits)) - 1;
    static constexpr uint32_t kOver = uint32_t(1) << 31;

    struct alignas(64) Thread {
        // What is left of its stretch, in one word: call, first piece, end. Whoever comes first in a call fills it in.
        std::atomic<uint64_t> left{0};
        uint32_t call = 0;          // of this run, counted by the thread itself
        std::atomic<int> core{-1};  // where it last began to wait
    };
    struct Stretch {
        uint64_t first, end;
    };
    int64_t bound(int64_t n, int64_t thread) const { return (n * thread + size_ - 1) / size_; }
    static uint64_t pack(uint32_t call, Stretch s) { return uint64_t(call) << (2 * kPieceBits) | s.first << kPieceBits | s.end; }
    Stretch find(int owner, uint32_t call, int64_t n, uint64_t word) const;
    int64_t take(int tid, uint32_t call, int64_t n);
    int64_t steal(int tid, uint32_t call, int64_t n);
    void settle(int tid, uint32_t call, int64_t n, int64_t done);

    int spins(int tid);
    void start(Body body, void* argument);
    void finish();
    void work(int tid);

    const int size_;
    const Kernels& kernels_;
    Buffer shared_[int(Shared::Count)];
    std::vector<std::array<Buffer, size_t(Own::Count)>> own_;  // of each thread
    std::vector<Buffer> scratch_, indices_;                    // of each thread
    uint64_t* progress_ = nullptr;
    std::mutex running_;
    Body body_ = nullptr;
    void* argument_ = nullptr;
    std::atomic<bool> stopping_{false};

    std::vector<Thread> threads_;
    alignas(64) std::atomic<int64_t> done_{0};      // pieces of the call that is open
    alignas(64) Signal closed_{0};      // calls of this run whose pieces are all done
    alignas(64) Signal inside_{kOver};  // workers in the body, and whether the run is over
    alignas(64) Signal runs_{0};
    std::vector<std::thread> workers_;
};

}  // namespace headrace
