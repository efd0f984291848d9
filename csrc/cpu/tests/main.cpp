// Runs the tests named on the command line, or all: kernels, team and plan without Python, meant for sanitizers.

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "support.h"
#include "tests.h"

namespace headrace {

namespace {

int failures = 0;

struct Test {
    const char* name;
    void (*run)();
};

const Test kTests[] = {{"draws", test_draws},         {"logits", test_rows_of_logits}, {"survivors", test_survivors},
                       {"inputs", test_step_inputs},  {"team", test_team},             {"bounds", test_bounds},
                       {"checks", test_checks},       {"tiles", test_tiles},           {"pieces", test_packed_pieces},
                       {"head", test_head},           {"plan", test_plan},             {"layers", test_layers}};

}  // namespace

void expect(bool fine, const std::string& what) {
    if (fine) return;
    ++failures;
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

}  // namespace headrace

int main(int count, char** names) {
    using namespace headrace;
    int ran = 0;
    for (const Test& test : kTests) {
        bool wanted = count == 1;
        for (int i = 1; i < count; ++i) wanted = wanted || std::strcmp(names[i], test.name) == 0;
        if (!wanted) continue;
        test.run();
        ++ran;
    }
    std::printf("units:");
    for (const Kernels* kernels : available_kernels()) std::printf(" %s", kernels->name);
    if (failures > 0) std::printf("; %d failures in %d tests\n", failures, ran);
    else std::printf("; %d tests: all fine\n", ran);
    return failures > 0 || ran == 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
