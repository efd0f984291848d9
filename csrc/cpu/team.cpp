#include "team.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
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

}  // namespace

template <class F> void Signal::wait_until(int spins, F&& fine) {
    for (int i = 0; i < spins; ++i) {
        if (fine(word.load(std::memory_order_acquire))) return;
        relax();
    }
    sleepers_.fetch_add(1);
    for (uint32_t value; !fine(value = word.load());)
        syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1);
}

void Signal::wake() {
    if (sleepers_.load() > 0) syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

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
    : size_(num_threads),
      kernels_(kernels),
      own_(size_t(num_threads)),
      scratch_(size_t(num_threads)),
      indices_(size_t(num_threads)),
      threads_(size_t(num_threads)) {
    for (int tid = 1; tid < size_; ++tid) workers_.emplace_back([this, tid] { work(tid); });
}

Team::~Team() {
    {
        std::lock_guard lock(running_);
        stopping_ = true;
        runs_.word.fetch_add(1);
        runs_.wake();
    }
    for (auto& worker : workers_) worker.join();
}

void Team::reserve_own(Own which, size_t bytes) {
    for (auto& buffers : own_) buffers[size_t(which)].reserve(bytes);
}

void Team::reserve_scratch(size_t floats) {
    for (auto& buffer : scratch_) buffer.reserve(floats * sizeof(float));
}

void Team::reserve_index(size_t entries) {
    for (auto& buffer : indices_) buffer.reserve(entries * sizeof(int64_t));
}

// Nobody is inside: what the last run has left is free to change.
void Team::start(Body body, void* argument) {
    body_ = body;
    argument_ = argument;
    for (auto& thread : threads_) {
        thread.left.store(0, std::memory_order_relaxed);
        thread.call = 0;
    }
    closed_.word.store(0, std::memory_order_relaxed);
    inside_.word.store(0, std::memory_order_release);
    runs_.word.fetch_add(1);
    runs_.wake();
}

// Lets nobody in any more and waits for those who are still inside, on their way out.
void Team::finish() {
    inside_.word.fetch_or(kOver);
    inside_.wait_until(spins(0), [](uint32_t inside) { return inside == kOver; });
}

int Team::spins(int tid) {
    const int here = sched_getcpu();
    threads_[size_t(tid)].core.store(here, std::memory_order_relaxed);
    for (int other = 0; other < size_; ++other)
        if (other != tid && threads_[size_t(other)].core.load(std::memory_order_relaxed) == here) return 0;
    return kSpins;
}

void Team::work(int tid) {
    for (uint32_t seen = 0;;) {
        runs_.wait_until(spins(tid), [&](uint32_t runs) { return runs != seen; });
        if (stopping_) return;
        seen = runs_.word.load();
        uint32_t inside = inside_.word.load(std::memory_order_relaxed);
        while (!(inside & kOver) && !inside_.word.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire)) {}
        if (inside & kOver) continue;
        seen = runs_.word.load(std::memory_order_relaxed);  // perhaps a later run than the one that woke it
        body_(argument_, tid);
        if (inside_.word.fetch_sub(1) - 1 == kOver) inside_.wake();
    }
}

Team::Stretch Team::find(int owner, uint32_t call, int64_t n, uint64_t word) const {
    constexpr uint64_t mask = uint64_t(kMostPieces);
    const auto found = uint32_t(word >> (2 * kPieceBits));
    if (found > call) return {0, 0};
    if (found == call) return {word >> kPieceBits & mask, word & mask};
    // A call is over when all of its pieces are taken: a stretch that is still of an earlier one then has none in it.
    if (n > kMostPieces || call > kMostCalls) std::abort();
    return {uint64_t(bound(n, owner)), uint64_t(bound(n, owner + 1))};
}

int64_t Team::take(int tid, uint32_t call, int64_t n) {
    std::atomic<uint64_t>& own = threads_[size_t(tid)].left;
    for (uint64_t word = own.load(std::memory_order_relaxed);;) {
        const Stretch s = find(tid, call, n, word);
        if (s.first >= s.end) return steal(tid, call, n);
        if (own.compare_exchange_weak(word, pack(call, {s.first + 1, s.end}), std::memory_order_relaxed)) return int64_t(s.first);
    }
}

// What somebody else has not begun, or the second half of what he has left, becomes the thread's own stretch: one stream again.
int64_t Team::steal(int tid, uint32_t call, int64_t n) {
    for (int distance = 1; distance < size_; ++distance) {
        const int owner = (tid + distance) % size_;
        std::atomic<uint64_t>& left = threads_[size_t(owner)].left;
        for (uint64_t word = left.load(std::memory_order_relaxed);;) {
            const Stretch s = find(owner, call, n, word);
            if (s.first >= s.end) break;
            const bool untouched = word >> (2 * kPieceBits) < call;
            const uint64_t middle = untouched ? s.first : s.first + (s.end - s.first) / 2;
            if (!left.compare_exchange_weak(word, pack(call, {s.first, middle}), std::memory_order_relaxed)) continue;
            threads_[size_t(tid)].left.store(pack(call, {middle + 1, s.end}), std::memory_order_relaxed);
            return int64_t(middle);
        }
    }
    return -1;
}

// Accounts for the pieces that this thread has done, and waits for those of the others. Whoever has done the last one closes
// the call; without pieces, whoever comes first.
void Team::settle(int tid, uint32_t call, int64_t n, int64_t done) {
    bool last = n == 0;
    if (done > 0 && done_.fetch_add(done, std::memory_order_acq_rel) + done == n) {
        done_.store(0, std::memory_order_relaxed);
        last = true;
    }
    if (last) {
        uint32_t before = call - 1;
        if (closed_.word.compare_exchange_strong(before, call)) closed_.wake();
        return;
    }
    closed_.wait_until(spins(tid), [&](uint32_t closed) { return closed >= call; });
}

}  // namespace headrace
