// What the tests share: expectations, random inputs, matrices as they lie in files, and all teams that this machine can run.
#pragma once

#include <cstring>
#include <initializer_list>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../features.h"
#include "../ops.h"

namespace headrace {

// Counts and prints what does not hold.
void expect(bool fine, const std::string& what);

template <class Error, class F> void expect_error(const std::string& what, F&& run) {
    try {
        run();
    } catch (const Error&) {
        return;
    }
    expect(false, "no error: " + what);
}

// Calls run(team, name) for every unit of this machine with each number of threads.
template <class F> void for_teams(std::initializer_list<int> threads, F&& run) {
    for (const Kernels* kernels : available_kernels())
        for (int n : threads) {
            Team team(n, *kernels);
            run(team, std::string(kernels->name) + " with " + std::to_string(n));
        }
}

struct Random {
    std::mt19937 engine;
    explicit Random(unsigned seed) : engine(seed) {}
    int below(int n) { return int(engine() % unsigned(n)); }
    std::vector<float> floats(size_t n, float scale = 1.0f) {
        std::normal_distribution<float> normal;
        std::vector<float> values(n);
        for (auto& v : values) v = normal(engine) * scale;
        return values;
    }
    std::vector<uint8_t> bytes(size_t n) {
        std::vector<uint8_t> values(n);
        for (auto& v : values) v = uint8_t(engine());
        return values;
    }
};

// A matrix in a file's format; scales are small float16 numbers.
struct Source {
    std::vector<uint8_t> data;
    SourceTensor tensor;
    Source(const std::string& name, int rows, int k, Random& random) {
        const FileFormat* format = find_file_format(name);
        const size_t row_bytes = format->row_bytes(k), block = size_t(format->bytes);
        data = random.bytes(row_bytes * size_t(rows));
        if (name == "F32") {
            const auto values = random.floats(size_t(rows) * size_t(k));
            std::memcpy(data.data(), values.data(), data.size());
        }
        // Any exponent but the largest ones: of float16 and bfloat16 alike, and of the float16 scales of blocks.
        const size_t first = name == "Q2_K" ? 80 : name == "Q3_K" ? 108 : name == "Q6_K" ? 208 : 0;
        const size_t halves = format->packed == Format::I8 || name == "Q4_0" || first > 80 ? 1 : 2;
        const int low = format->read ? 0x24 : 0x38;
        for (size_t at = first; name != "F32" && at < data.size(); at += block)
            for (size_t i = 1; i < 2 * (format->read ? halves : 1); i += 2) data[at + i] = uint8_t((data[at + i] & 0x83) | low);
        tensor = {format, rows, data.data(), row_bytes};
    }
};

// A random matrix, packed; `twice` as a gate with its up half. Formats whose blocks do not fit `k` become Q8_0.
inline std::shared_ptr<Weight> pack_random(Team& team, const std::string& format, int rows, int k, Random& random,
                                           bool twice = false) {
    const std::string fitting = k % find_file_format(format)->values ? "Q8_0" : format;
    std::vector<Source> sources;
    for (int i = 0; i < (twice ? 2 : 1); ++i) sources.emplace_back(fitting, rows, k, random);
    std::vector<SourceTensor> parts;
    for (const auto& source : sources) parts.push_back(source.tensor);
    return pack_weight(team, parts, k, "", twice);
}

}  // namespace headrace
