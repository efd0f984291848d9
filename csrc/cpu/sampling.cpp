#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "draw.h"

namespace headrace {

namespace {

constexpr int kBlock = 256;
// Buckets of values by their distance from the greatest one; the last one holds everything far below.
constexpr int kPerUnit = 64, kBuckets = 24 * kPerUnit + 1;

int bucket_of(float x, float peak) {
    const float distance = peak - x;
    return distance < 24.0f ? int(distance * float(kPerUnit)) : kBuckets - 1;
}

// Best first, and the lowest id of equals.
struct Better {
    const float* x;
    bool operator()(int32_t a, int32_t b) const { return x[a] > x[b] || (x[a] == x[b] && a < b); }
};

// One row with the greatest value of each of its blocks.
struct Row {
    Row(const Kernels& kernels, const float* x, int n) : kernels(kernels), x(x), n(n), peaks(size_t((n + kPeakBlock - 1) / kPeakBlock)) {
        kernels.block_peaks(x, n, peaks.data());
        peak = *std::max_element(peaks.begin(), peaks.end());
        if (peak == INFINITY) throw std::domain_error("a row of logits is not finite");
    }

    // Calls found(id) for the finite values from `least` on, ascending by id.
    template <class F> void for_each_from(float least, F&& found) const {
        least = std::max(least, std::numeric_limits<float>::lowest());
        for (size_t b = 0; b < peaks.size(); ++b) {
            if (peaks[b] < least) continue;
            const int end = std::min(n, int(b + 1) * kPeakBlock);
            for (int32_t i = int(b) * kPeakBlock; i < end; ++i)
                if (x[i] >= least) found(i);
        }
    }

    // A value that at least `k` values reach: the k-th greatest peak of the blocks.
    float reached_by(int k) const {
        if (size_t(k) > peaks.size()) return -INFINITY;
        std::vector<float> sorted = peaks;
        std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<>());
        return sorted[size_t(k - 1)];
    }

    // The `k` greatest finite values, in no order.
    std::vector<int32_t> select_top(int k) const {
        std::vector<int32_t> ids;
        for_each_from(reached_by(k), [&](int32_t id) { ids.push_back(id); });
        if (ids.size() > size_t(k)) {
            std::nth_element(ids.begin(), ids.begin() + k, ids.end(), Better{x});
            ids.resize(size_t(k));
        }
        return ids;
    }

    // The same, best first.
    std::vector<int32_t> find_top(int k) const {
        std::vector<int32_t> ids = select_top(k);
        std::sort(ids.begin(), ids.end(), Better{x});
        return ids;
    }

    const Kernels& kernels;
    const float* x;
    const int n;
    std::vector<float> peaks;
    float peak;
};

// The shortest best-first prefix that holds a share of the weight, as far as a few of the best reach.
constexpr int kFirstTry = 64, kLastTry = 512;

class Nucleus {
public:
    Nucleus(const Row& row, double top_p) : row_(row), weights_(size_t(row.n)) {
        row.kernels.weigh(row.x, row.n, row.peak, weights_.data());
        target_ = top_p * double(std::accumulate(weights_.begin(), weights_.end(), int64_t(0)));
    }

    // Ids, ascending.
    std::vector<int32_t> find() const {
        std::vector<int32_t> kept;
        for (int count = kFirstTry; count <= kLastTry; count *= 8)
            if (take(row_.find_top(count), 0, kept)) return sorted(kept);
        return sorted(find_by_buckets());
    }

private:
    static std::vector<int32_t> sorted(std::vector<int32_t> ids) {
        std::sort(ids.begin(), ids.end());
        return ids;
    }

    // Adds ids to `kept`, whose weight is `mass`, until the target is reached; says whether it was.
    bool take(const std::vector<int32_t>& ids, int64_t mass, std::vector<int32_t>& kept) const {
        const size_t before = kept.size();
        for (const int32_t id : ids) {
            kept.push_back(id);
            mass += weights_[size_t(id)];
            if (double(mass) >= target_) return true;
        }
        kept.resize(before);
        return false;
    }

    std::vector<int32_t> find_by_buckets() const {
        std::vector<int64_t> masses(kBuckets);
        for (int i = 0; i < row_.n; ++i)
            if (weights_[size_t(i)] > 0) masses[size_t(bucket_of(row_.x[i], row_.peak))] += weights_[size_t(i)];
        int last = 0;
        int64_t mass = 0;
        while (last < kBuckets - 1 && double(mass + masses[size_t(last)]) < target_) mass += masses[size_t(last++)];
        std::vector<int32_t> kept, border;
        row_.for_each_from(-INFINITY, [&](int32_t id) {
            const int bucket = bucket_of(row_.x[id], row_.peak);
            if (bucket < last) kept.push_back(id);
            else if (bucket == last) border.push_back(id);
        });
        std::sort(border.begin(), border.end(), Better{row_.x});
        if (!take(border, mass, kept)) kept.insert(kept.end(), border.begin(), border.end());
        return kept;
    }

    const Row& row_;
    std::vector<int64_t> weights_;
    double target_;
};

// Log of the sum of exp over the row.
double log_sum_exp(const Kernels& kernels, const float* x, int n, float peak) {
    int64_t weights[kBlock], total = 0;
    for (int first = 0; first < n; first += kBlock) {
        const int count = std::min(kBlock, n - first);
        kernels.weigh(x + first, count, peak, weights);
        for (int i = 0; i < count; ++i) total += weights[i];
    }
    return double(peak) + log_of(double(total) * 0x1p-34);
}

}  // namespace

std::vector<int32_t> find_survivors(const Kernels& kernels, const float* x, int n, const Filters& filters) {
    const Row row(kernels, x, n);
    const bool cut = filters.top_k > 0 && filters.top_k < n;
    if (!cut && filters.least == -INFINITY) return Nucleus(row, filters.top_p).find();
    std::vector<int32_t> ids;
    // The greatest value is zero. Of the tokens that min_p keeps, the top k are the top k of all.
    if (cut) {
        ids = row.select_top(filters.top_k);
        std::erase_if(ids, [&](int32_t id) { return x[id] < filters.least; });
        std::sort(ids.begin(), ids.end());
    } else {
        row.for_each_from(filters.least, [&](int32_t id) { ids.push_back(id); });
    }
    if (filters.top_p >= 1 || ids.empty()) return ids;
    std::vector<float> values;
    for (const int32_t id : ids) values.push_back(x[id]);
    std::vector<int32_t> places = Nucleus(Row(kernels, values.data(), int(values.size())), filters.top_p).find();
    for (int32_t& place : places) place = ids[size_t(place)];
    return places;
}

int draw_row(const Kernels& kernels, const float* x, int n, const Draw& how) {
    thread_local std::vector<float> scaled;
    scaled.assign(x, x + n);
    kernels.scale_logits(scaled.data(), n, how.peak, how.temperature);
    if (!how.filters.any(n)) return draw_token(kernels, scaled.data(), n, how.seed, how.position);
    return draw_among(scaled.data(), find_survivors(kernels, scaled.data(), n, how.filters), how.seed, how.position);
}

std::tuple<std::vector<int32_t>, std::vector<double>, int> token_logprobs(const Kernels& kernels, const float* x, int n, int token,
                                                                           int num_best) {
    const Row row(kernels, x, n);
    const float value = x[token];
    const double log_sum = log_sum_exp(kernels, x, n, row.peak);
    int rank = 1;
    for (int i = 0; i < n; ++i) rank += x[i] > value;
    for (int i = 0; i < token; ++i) rank += x[i] == value;
    std::vector<int32_t> ids{token};
    if (num_best > 0) {
        const std::vector<int32_t> best = row.find_top(std::min(num_best, n));
        ids.insert(ids.end(), best.begin(), best.end());
    }
    std::vector<double> values;
    for (const int32_t id : ids) values.push_back(double(x[id]) - log_sum);
    return {ids, values, rank};
}

}  // namespace headrace
