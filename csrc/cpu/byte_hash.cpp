#include "byte_hash.h"

#include <cstring>

namespace headrace {

namespace {

constexpr size_t kLanes = 8;
constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;

// One to one in `state` for every word and in the word for every state, so that one changed word never goes unseen.
uint64_t mix(uint64_t state, uint64_t word) {
    state = (state ^ word) * kOdd;
    return state ^ state >> 29;
}

}  // namespace

uint64_t hash_bytes(const uint8_t* data, size_t size) {
    uint64_t lanes[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8}, word;
    size_t done = 0;
    for (; size - done >= sizeof lanes; done += sizeof lanes)
        for (size_t i = 0; i < kLanes; ++i) {
            std::memcpy(&word, data + done + i * sizeof word, sizeof word);
            lanes[i] = mix(lanes[i], word);
        }
    uint64_t hash = mix(kOdd, size);
    for (const uint64_t lane : lanes) hash = mix(hash, lane);
    for (; done < size; ++done) hash = mix(hash, data[done]);
    return hash;
}

}  // namespace headrace
