// Work on a row of logits, and draws from it: every unit against the generic one, and against a full sort.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "../draw.h"
#include "../sampling.h"
#include "support.h"
#include "tests.h"

namespace headrace {

namespace {

const int kWidths[] = {1, 7, 31, 32, 33, 63, 64, 65, 255, 600, 1500};

// Ties, and tokens that are forbidden, but never the greatest.
std::vector<float> make_row(Random& random, int n, float spread, bool forbid = true) {
    auto x = random.floats(size_t(n), spread);
    for (float& v : x) {
        if (random.below(5) == 0) v = spread / 2;
        if (forbid && random.below(5) == 0) v = -INFINITY;
    }
    x[size_t(random.below(n))] = 3 * spread;
    const float peak = *std::max_element(x.begin(), x.end());
    for (float& v : x) v -= peak;
    return x;
}

// Best first, and the lowest id of equals; finite ones only.
std::vector<int32_t> sort_ids(const std::vector<float>& x) {
    std::vector<int32_t> ids;
    for (size_t i = 0; i < x.size(); ++i)
        if (x[i] > -INFINITY) ids.push_back(int32_t(i));
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return x[size_t(a)] > x[size_t(b)]; });
    return ids;
}

std::vector<int32_t> sort_survivors(const std::vector<float>& x, const Filters& f) {
    auto ids = sort_ids(x);
    if (f.top_k > 0 && size_t(f.top_k) < ids.size()) ids.resize(size_t(f.top_k));
    std::erase_if(ids, [&](int32_t id) { return x[size_t(id)] < f.least; });
    if (f.top_p < 1) {
        // Forbidden tokens have a weight too where no other filter has taken them out.
        std::vector<float> left;
        for (const int32_t id : ids) left.push_back(x[size_t(id)]);
        const bool filtered = (f.top_k > 0 && f.top_k < int(x.size())) || f.least > -INFINITY;
        const auto& weighed = filtered ? left : x;
        std::vector<int64_t> weights(weighed.size()), of_left(left.size());
        find_kernels("generic").weigh(weighed.data(), int(weighed.size()), 0, weights.data());
        find_kernels("generic").weigh(left.data(), int(left.size()), 0, of_left.data());
        const double target = f.top_p * double(std::accumulate(weights.begin(), weights.end(), int64_t(0)));
        size_t count = 0;
        for (int64_t mass = 0; count < ids.size() && double(mass) < target; ++count) mass += of_left[count];
        ids.resize(std::max<size_t>(count, 1));
    }
    std::sort(ids.begin(), ids.end());
    return ids;
}

std::vector<float> change_row(const Kernels& k, std::vector<float> x, unsigned seed) {
    Random random(seed);
    const int n = int(x.size());
    std::vector<uint32_t> words(size_t(n + 31) / 32);
    for (auto& word : words) word = random.below(2) ? 0xffffffffu : uint32_t(random.engine());
    std::vector<uint8_t> in_prompt(x.size());
    std::vector<int32_t> counts(x.size());
    for (size_t i = 0; i < x.size(); ++i) in_prompt[i] = random.below(9) == 0, counts[i] = random.below(9) ? 0 : random.below(5);
    k.apply_penalties(x.data(), in_prompt.data(), counts.data(), n, 1.3f, 0.4f, 0.2f);
    k.apply_bitmask(x.data(), words.data(), n);
    k.scale_logits(x.data(), n, 0.5f, 0.7f);
    return x;
}

}  // namespace

void test_rows_of_logits() {
    const Kernels& plain = find_kernels("generic");
    for (const int n : kWidths)
        for (unsigned trial = 0; trial < 8; ++trial) {
            Random random(trial);
            const auto x = make_row(random, n, float(1 << trial) / 16, trial % 2 == 0);
            const size_t blocks = size_t(n + kPeakBlock - 1) / kPeakBlock;
            std::vector<int64_t> want_weights(static_cast<size_t>(n));
            std::vector<float> want_peaks(blocks);
            plain.weigh(x.data(), n, 0, want_weights.data());
            plain.block_peaks(x.data(), n, want_peaks.data());
            for (const Kernels* k : available_kernels()) {
                const std::string name = std::string(k->name) + ", " + std::to_string(n) + " logits";
                std::vector<int64_t> weights(want_weights.size());
                std::vector<float> peaks(blocks), odd = x;
                k->weigh(x.data(), n, 0, weights.data());
                k->block_peaks(x.data(), n, peaks.data());
                expect(weights == want_weights && peaks == want_peaks, "weights and peaks on " + name);
                expect(change_row(*k, x, trial) == change_row(plain, x, trial), "masks and penalties on " + name);
                const auto top = std::max_element(x.begin(), x.end());
                expect(k->arg_max(x.data(), n) == int(top - x.begin()), "arg max on " + name);
                Best best{-INFINITY, INT_MAX};
                k->find_best(x.data(), n, 1, n, 10, &best);
                expect(best.value == *top && best.id == 10 + int(top - x.begin()), "the best on " + name);
                odd[size_t(random.below(n))] = trial % 2 ? NAN : INFINITY;
                k->block_peaks(odd.data(), n, peaks.data());
                expect(*std::max_element(peaks.begin(), peaks.end()) == INFINITY, "a peak that is not finite on " + name);
            }
        }
}

void test_survivors() {
    for (const int n : kWidths)
        for (unsigned trial = 0; trial < 40; ++trial) {
            Random random(trial);
            const float spreads[] = {0, 0.01f, 1, 4, 30};
            const auto x = make_row(random, n, spreads[random.below(5)]);
            const int tops[] = {0, 1, 2, 5, 50, 5000};
            const float leasts[] = {-INFINITY, -5, -0.1f, 0};
            const double shares[] = {1, 1e-6, 0.1, 0.5, 0.9, 0.999};
            const Filters filters{tops[random.below(6)], leasts[random.below(4)], shares[random.below(6)]};
            if (!filters.any(n)) continue;
            const auto want = sort_survivors(x, filters);
            const auto order = sort_ids(x);
            const int token = order[size_t(random.below(int(order.size())))], wanted = random.below(30);
            const auto logprobs = token_logprobs(find_kernels("generic"), x.data(), n, token, wanted);
            const auto place = std::find(order.begin(), order.end(), token) - order.begin();
            expect(std::get<2>(logprobs) == int(place) + 1, "the rank of a token");
            std::vector<int32_t> ids{token};
            ids.insert(ids.end(), order.begin(), order.begin() + std::min(order.size(), size_t(wanted)));
            expect(std::get<0>(logprobs) == ids, "the best tokens");
            for (const Kernels* k : available_kernels()) {
                const std::string name =
                    std::string(k->name) + ", " + std::to_string(n) + " logits, trial " + std::to_string(trial);
                expect(find_survivors(*k, x.data(), n, filters) == want, "survivors on " + name);
                expect(token_logprobs(*k, x.data(), n, token, wanted) == logprobs, "log-probabilities on " + name);
            }
        }
}

void test_draws() {
    const Kernels& plain = find_kernels("generic");
    Random random(5);
    for (const int n : {1, 31, 32, 33, 1000}) {
        std::vector<int32_t> all(static_cast<size_t>(n));
        std::iota(all.begin(), all.end(), 0);
        const std::vector<float> none(size_t(n), -INFINITY);
        for (uint64_t position = 0; position < 50; ++position) {
            const auto x = random.floats(size_t(n), float(position % 5));
            const int want = draw_token(plain, x.data(), n, 11, position);
            expect(want >= 0 && want < n && want == draw_among(x.data(), all, 11, position), "a token of the row");
            auto odd = x;
            odd[size_t(random.below(n))] = position % 2 ? NAN : INFINITY;
            for (const Kernels* k : available_kernels()) {
                expect(draw_token(*k, x.data(), n, 11, position) == want, std::string("a draw on ") + k->name);
                expect(draw_token(*k, none.data(), n, 11, position) == -1, std::string("a draw of nothing on ") + k->name);
                const int any = draw_token(*k, odd.data(), n, 11, position);
                expect(any >= -1 && any < n, std::string("a draw from a row that is not finite on ") + k->name);
                for (const Filters& filters : {Filters{0, -INFINITY, 0.9}, Filters{5, -INFINITY, 0.5}, Filters{0, -3, 1}}) {
                    expect_error<std::domain_error>("survivors of a row that is not finite",
                                                    [&] { find_survivors(*k, odd.data(), n, filters); });
                    expect(find_survivors(*k, none.data(), n, filters).empty(), "survivors of nothing");
                }
                expect_error<std::domain_error>("log-probabilities of a row that is not finite",
                                                [&] { token_logprobs(*k, odd.data(), n, 0, 3); });
            }
        }
    }
}

}  // namespace headrace
