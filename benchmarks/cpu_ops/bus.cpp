// Reads of one large buffer by several threads, nothing else: the limit of memory for whatever streams weights.
//
// Threads live as long as the buffer. Between calls they sleep; within a call they meet at a barrier that spins.

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace {

typedef uint64_t Line __attribute__((vector_size(64)));

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Bus {
public:
    Bus(size_t bytes, int threads) : bytes_(bytes), threads_(threads) {
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) std::terminate();
        madvise(memory, bytes, MADV_HUGEPAGE);
        std::memset(memory, 1, bytes);
        data_ = static_cast<const Line*>(memory);
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
    }

    ~Bus() {
        start(0, 0, 0);
        for (auto& worker : workers_) worker.join();
        munmap(const_cast<Line*>(data_), bytes_);
    }

    // Seconds of each of `passes` over the first `bytes`, fetching `ahead` bytes before they are needed (0: the CPU's own way).
    void read(size_t bytes, size_t ahead, int passes, double* seconds) {
        start(bytes, ahead, passes);
        for (int pass = 0; pass < passes; ++pass) {
            meet();
            const auto began = std::chrono::steady_clock::now();
            read_share(0);
            meet();
            seconds[pass] = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        }
    }

    uint64_t sum() const { return sum_; }

private:
    void start(size_t bytes, size_t ahead, int passes) {
        std::lock_guard lock(mutex_);
        wanted_ = bytes, ahead_ = ahead, passes_ = passes;
        ++calls_;
        called_.notify_all();
    }

    void work(int index) {
        for (uint64_t seen = 0;;) {
            int passes;
            {
                std::unique_lock lock(mutex_);
                called_.wait(lock, [&] { return calls_ != seen; });
                seen = calls_;
                passes = passes_;
            }
            if (passes == 0) return;
            for (int pass = 0; pass < passes; ++pass) {
                meet();
                read_share(index);
                meet();
            }
        }
    }

    void meet() {
        const uint32_t turn = turn_.load();
        if (waiting_.fetch_add(1) + 1 == threads_) {
            waiting_ = 0;
            turn_.fetch_add(1);
            return;
        }
        while (turn_.load(std::memory_order_acquire) == turn) relax();
    }

    void read_share(int index) {
        const size_t lines = wanted_ / sizeof(Line), first = lines * size_t(index) / size_t(threads_);
        const size_t end = lines * size_t(index + 1) / size_t(threads_), ahead = ahead_ / sizeof(Line);
        Line sums[8] = {};
        for (size_t at = first; at + 8 <= end; at += 8)
            for (size_t i = 0; i < 8; ++i) {
                if (ahead) __builtin_prefetch(data_ + at + i + ahead);
                sums[i] += data_[at + i];
            }
        for (size_t i = 1; i < 8; ++i) sums[0] += sums[i];
        sum_ += sums[0][0] + sums[0][7];
    }

    const size_t bytes_;
    const int threads_;
    const Line* data_;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable called_;
    uint64_t calls_ = 0;
    size_t wanted_ = 0, ahead_ = 0;
    int passes_ = 0;
    alignas(64) std::atomic<int> waiting_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
    alignas(64) std::atomic<uint64_t> sum_{0};
};

}  // namespace

extern "C" {

void* bus_open(size_t bytes, int threads) { return new Bus(bytes, threads); }
void bus_read(void* bus, size_t bytes, size_t ahead, int passes, double* seconds) {
    static_cast<Bus*>(bus)->read(bytes, ahead, passes, seconds);
}
uint64_t bus_sum(void* bus) { return static_cast<Bus*>(bus)->sum(); }
void bus_close(void* bus) { delete static_cast<Bus*>(bus); }
}
