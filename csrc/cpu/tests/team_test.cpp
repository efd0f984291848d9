// The order in which a team runs pieces, and who may see what.

#include <chrono>
#include <thread>

#include "support.h"
#include "tests.h"

namespace headrace {

namespace {

// Holds a thread up for a while, as a busy system would: mostly not, sometimes for longer than a whole run.
void hold_up(Random& random) {
    if (random.below(8) > 0) return;
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(random.below(random.below(10) == 0 ? 500 : 20));
    while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
}

}  // namespace

// Every piece runs once, after all pieces of the calls before, however many there are, however they are shared and whoever
// comes late; a run that has returned is over for everybody.
void test_team() {
    constexpr int calls = 5, most = 37;
    for (int threads : {1, 2, 3, 8}) {
        Team team(threads, find_kernels("generic"));
        for (int round = 0; round < 300; ++round) {
            std::vector<int> seen(calls * most);
            int sums[calls + 1] = {};
            const auto pieces_of = [&](int call) { return (round + 11 * call) % most; };
            team.run([&](int tid) {
                Random random(unsigned(round * threads + tid));
                hold_up(random);
                for (int call = 0; call < calls; ++call) {
                    team.for_each(tid, pieces_of(call), [&](int64_t i) {
                        hold_up(random);
                        seen[size_t(call * most + i)] += 1 + sums[call];
                    });
                    hold_up(random);
                    team.for_each(tid, 1, [&](int64_t) {
                        for (int i = 0; i < pieces_of(call); ++i) sums[call + 1] += seen[size_t(call * most + i)];
                        sums[call + 1] %= 1000;
                    });
                }
                hold_up(random);
            });
            int sum = 0;
            for (int call = 0; call < calls; ++call) sum = pieces_of(call) * (1 + sum) % 1000;
            expect(sums[calls] == sum, "each piece once, and in order");
        }
    }
}

}  // namespace headrace
