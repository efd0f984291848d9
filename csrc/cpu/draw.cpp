#include "draw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

namespace headrace {

constexpr double kLn2 = 0.6931471805599453, kSqrtHalf = 0.7071067811865476;

double log_of(double x) {
    int e;
    double m = std::frexp(x, &e);
    if (m < kSqrtHalf) m = m + m, e = e - 1;
    const double f = (m - 1.0) / (m + 1.0), z = f * f;
    double p = 1.0 / 21;
    for (int n = 19; n >= 1; n -= 2) p = p * z + 1.0 / n;
    return double(e) * kLn2 + (f + f) * p;
}

namespace {

uint64_t mix64(uint64_t z) {
    z += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

uint32_t mix32(uint32_t h) {
    h = (h ^ (h >> 16)) * 0x85EBCA6B;
    h = (h ^ (h >> 13)) * 0xC2B2AE35;
    return h ^ (h >> 16);
}

uint32_t hash_token(uint32_t id, uint32_t low, uint32_t high) { return mix32(mix32(id ^ low) ^ high); }

double noise_of(uint32_t hash) {
    const double u = (double(hash) + 0.5) * 0x1p-32;
    return -log_of(-log_of(u));
}

// Not below the noise of this hash, and cheap: -log(-log(1 - v)) <= -log(v), with v taken down to a power of two.
double most_noise_of(uint32_t hash) { return 0.6932 * (std::countl_zero(~hash) + 1); }

struct Best {
    double score = -INFINITY;
    int id = -1;
};

// Ids ascend: the first of equals is the lowest.
Best best_of(const float* x, const std::vector<Contender>& contenders, int count) {
    Best best;
    for (int i = 0; i < count; ++i) {
        const Contender& c = contenders[size_t(i)];
        if (double(x[c.id]) + most_noise_of(c.hash) < best.score) continue;
        const double score = double(x[c.id]) + noise_of(c.hash);
        if (score > best.score) best = {score, c.id};
    }
    return best;
}

}  // namespace

int draw_among(const float* x, const std::vector<int32_t>& ids, uint64_t seed, uint64_t position) {
    const uint64_t key = mix64(mix64(seed) ^ position);
    std::vector<Contender> contenders;
    contenders.reserve(ids.size());
    for (const int32_t id : ids) contenders.push_back({id, hash_token(uint32_t(id), uint32_t(key), uint32_t(key >> 32))});
    return best_of(x, contenders, int(contenders.size())).id;
}

int draw_token(const Kernels& kernels, const float* x, int n, uint64_t seed, uint64_t position) {
    thread_local std::vector<Contender> contenders;
    if (contenders.size() <= size_t(n)) contenders.resize(size_t(n) + 1);
    const uint64_t key = mix64(mix64(seed) ^ position);
    const uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
    // What the greatest value itself reaches bounds who else may win.
    const int top = kernels.arg_max(x, n);
    const double reached = double(x[top]) + noise_of(hash_token(uint32_t(top), low, high));
    const float least = float(reached - 0.01 - std::fabs(reached) * 1e-6);
    const int count = kernels.find_contenders(x, n, low, high, least, contenders.data());
    return best_of(x, contenders, count).id;
}

}  // namespace headrace
