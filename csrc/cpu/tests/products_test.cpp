// Tiles of products.

#include "support.h"
#include "tests.h"

namespace headrace {

// Each row of each number of rows, so each tile and each place in it, has the bits of the row alone on the generic unit.
// Outputs end inside a panel; the last rows of x are taken, so that reading past one is seen.
void test_tiles() {
    constexpr int most = 35, outputs = 83, width = 256;
    Team plain(1, find_kernels("generic"));
    for (const char* format : {"Q4_1", "Q8_0", "Q4_K", "Q5_1", "Q6_K", "BF16"})
        for (bool exact : {false, true}) {
            Random random(13);
            const Source source(format, outputs, width, random);
            const auto x = random.floats(most * width);
            const auto multiply = [&](Team& team, int first, int rows) {
                std::vector<float> out(size_t(rows * outputs));
                LinearOp op;
                op.weight = pack_weight(team, {source.tensor}, width, "", false);
                op.input = {Rows::Tokens, width, x.data() + first * width, exact || !op.weight->quantized(), nullptr};
                op.out = out.data();
                run_op(team, op, {rows, 1, 0});
                return out;
            };
            std::vector<float> want;
            for (int row = 0; row < most; ++row)
                for (float value : multiply(plain, row, 1)) want.push_back(value);
            for (const Kernels* kernels : available_kernels()) {
                Team team(2, *kernels);
                for (int rows = 1; rows <= most; ++rows) {
                    const std::vector<float> alone(want.end() - rows * outputs, want.end());
                    expect(multiply(team, most - rows, rows) == alone, std::string(format) + " in tiles of " +
                                                                           kernels->name + ", " + std::to_string(rows) + " rows");
                }
            }
        }
}

// Pieces that were packed from other parts are refused; the right ones give the same bytes without copying.
void test_packed_pieces() {
    Team team(2, find_kernels(""));
    Random random(6);
    const Source one("Q4_1", 40, 64, random), other("Q8_0", 40, 64, random);
    const auto packed = pack_weight(team, {one.tensor}, 64, "", false);
    const SourceTensor form{one.tensor.format, 40, nullptr, 0}, taller{one.tensor.format, 80, nullptr, 0};
    const SourceTensor wider{other.tensor.format, 40, nullptr, 0};
    const auto adopted = pack_weight(team, {form}, 64, "", false, packed->pieces);
    expect(adopted->segments[0].data == packed->segments[0].data, "adopted pieces are used where they lie");
    for (const auto& wrong : {std::vector{taller}, std::vector{wider}, std::vector{form, wider}})
        expect_error<std::invalid_argument>("pieces of another weight",
                                            [&] { pack_weight(team, wrong, 64, "", false, packed->pieces); });
}

}  // namespace headrace
