// Number formats of model files: what the packer can read, and as which panels.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/table.h"

namespace headrace {

// One group of 32 in the form of the panels. `scale` holds one number for the group, or one for each half (I8G16).
struct Group {
    int8_t q[kGroup];
    float scale[2];
    float minimum;
};

struct FileFormat {
    const char* name;
    int values, bytes;  // of a block
    Format packed;
    bool wide_scales;
    // Reads group `index` of a block; null for float formats.
    void (*read)(const uint8_t* block, int index, Group& out);

    size_t row_bytes(int width) const { return size_t(width / values) * size_t(bytes); }
    void read_group(const uint8_t* row, int group, Group& out) const {
        const int per_block = values / kGroup;
        read(row + size_t(group / per_block) * size_t(bytes), group % per_block, out);
    }
};

// Null for a format that has no packed form.
const FileFormat* find_file_format(const std::string& name);

}  // namespace headrace
