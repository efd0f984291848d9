// A quick check of bytes that were written to a disk. Not for bytes that somebody may want to forge.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

uint64_t hash_bytes(const uint8_t* data, size_t size);

}  // namespace headrace
