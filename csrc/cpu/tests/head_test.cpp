// The head by tiles against all logits and their arg max.

#include <cmath>

#include "model.h"
#include "tests.h"

namespace headrace {

namespace {

constexpr int kWidth = 64, kFirstPart = 96, kVocab = 163, kLd = kVocab + 5, kMost = 131;
constexpr float kUntouched = -7e30f;

// Two segments; rows 100 and 160 repeat row 97, so that their logits are equal.
std::shared_ptr<Weight> make_weight(Team& team, const std::string& second) {
    Random random(23);
    Source one("Q8_0", kFirstPart, kWidth, random), two(second, kVocab - kFirstPart, kWidth, random);
    for (const int row : {100, 160})
        std::memcpy(two.data.data() + size_t(row - kFirstPart) * two.tensor.row_bytes,
                    two.data.data() + size_t(97 - kFirstPart) * two.tensor.row_bytes, two.tensor.row_bytes);
    return pack_weight(team, {one.tensor, two.tensor}, kWidth, "", false);
}

struct Answers {
    std::vector<int32_t> best;
    std::vector<float> peaks, logits;
};

// All logits, and the greatest by looking at each.
Answers look_at_all(Team& team, const std::shared_ptr<Weight>& weight, const std::vector<float>& x, bool exact, float softcap) {
    Answers a;
    a.logits.resize(size_t(kMost) * kVocab);
    LinearOp op;
    op.input = {Rows::Logits, kWidth, x.data(), exact || !weight->quantized(), nullptr};
    op.weight = weight, op.softcap = softcap, op.out = a.logits.data();
    run_op(team, op, {0, 0, kMost});
    for (int r = 0; r < kMost; ++r) {
        const float* row = a.logits.data() + r * kVocab;
        int at = 0;
        for (int i = 0; i < kVocab && std::isfinite(row[at]); ++i)
            if (!std::isfinite(row[i]) || row[i] > row[at]) at = i;
        a.best.push_back(at);
        a.peaks.push_back(std::isfinite(row[at]) ? row[at] : INFINITY);
    }
    return a;
}

void check_rows(Team& team, const Answers& want, HeadOp& op, const std::vector<float>& x, int rows, int best_rows,
                const std::string& what) {
    std::vector<int32_t> best(static_cast<size_t>(rows));
    std::vector<float> peaks(best.size()), logits(size_t(rows - best_rows) * kLd, kUntouched);
    const int first = kMost - rows;
    op.input.x = x.data() + first * kWidth;
    op.best = best.data(), op.peaks = peaks.data(), op.logits = logits.data(), op.ld = kLd, op.max_logits = rows - best_rows;
    run_op(team, op, {0, 0, rows, best_rows});
    bool fine = true;
    for (int r = 0; r < rows; ++r) {
        const bool finite = std::isfinite(want.peaks[size_t(first + r)]);
        fine = fine && peaks[size_t(r)] == want.peaks[size_t(first + r)];
        fine = fine && (!finite || best[size_t(r)] == want.best[size_t(first + r)]);
        if (r < best_rows) continue;
        const float* row = logits.data() + (r - best_rows) * kLd;
        fine = fine && std::memcmp(row, want.logits.data() + (first + r) * kVocab, kVocab * sizeof(float)) == 0;
        for (int i = kVocab; i < kLd; ++i) fine = fine && row[i] == kUntouched;
    }
    expect(fine, what + ", " + std::to_string(rows) + " rows, " + std::to_string(best_rows) + " of them without logits");
}

}  // namespace

void test_head() {
    for (const char* format : {"Q4_1", "Q8_0", "BF16"})
        for (const float softcap : {0.0f, 20.0f}) {
            const bool exact = softcap > 0;
            Random random(31);
            auto x = random.floats(size_t(kMost) * kWidth);
            x[size_t(kMost - 3) * kWidth + 5] = NAN;
            x[size_t(kMost - 40) * kWidth + 63] = INFINITY;
            Team one(1, find_kernels("generic"));
            const Answers want = look_at_all(one, make_weight(one, format), x, exact, softcap);
            for_teams({1, 2, 5}, [&](Team& team, const std::string& name) {
                HeadOp op;
                op.weight = make_weight(team, format), op.softcap = softcap;
                op.input = {Rows::Logits, kWidth, nullptr, exact || !op.weight->quantized(), nullptr};
                for (const int rows : {1, 2, 3, 7, 15, 16, 17, 33, 64, 127, 128, 129, kMost})
                    for (const int best_rows : {0, rows / 2, rows})
                        check_rows(team, want, op, x, rows, best_rows, std::string(format) + " on " + name);
            });
        }
}

}  // namespace headrace
