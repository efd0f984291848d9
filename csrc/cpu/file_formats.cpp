#include "file_formats.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"

namespace headrace {

namespace {

float half_at(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return f16_to_float(h);
}

// Sixteen bytes: k 0..15 in the low nibbles, 16..31 in the high ones.
void read_nibbles(const uint8_t* nibbles, Group& out) {
    for (int i = 0; i < 16; ++i) {
        out.q[i] = nibbles[i] & 15;
        out.q[16 + i] = int8_t(nibbles[i] >> 4);
    }
}

void add_fifth_bits(const uint8_t* bits, int offset, Group& out) {
    for (int i = 0; i < kGroup; ++i) out.q[i] = int8_t((out.q[i] | (bits[i / 8] >> (i % 8) & 1) << 4) - offset);
}

void read_q8_0(const uint8_t* block, int, Group& out) {
    out.scale[0] = half_at(block);
    std::memcpy(out.q, block + 2, kGroup);
}

void read_q4_0(const uint8_t* block, int, Group& out) {
    out.scale[0] = half_at(block);
    out.minimum = -8.0f * out.scale[0];
    read_nibbles(block + 2, out);
}

void read_q4_1(const uint8_t* block, int, Group& out) {
    out.scale[0] = half_at(block);
    out.minimum = half_at(block + 2);
    read_nibbles(block + 4, out);
}

void read_q5_0(const uint8_t* block, int, Group& out) {
    out.scale[0] = half_at(block);
    read_nibbles(block + 6, out);
    add_fifth_bits(block + 2, 16, out);
}

void read_q5_1(const uint8_t* block, int, Group& out) {
    out.scale[0] = half_at(block);
    out.minimum = half_at(block + 2);
    read_nibbles(block + 8, out);
    add_fifth_bits(block + 4, 0, out);
}

// Two halves, then six-bit scale and minimum of each group: the last four of them have their high bits with the first four.
void read_six_bit_scales(const uint8_t* block, int group, Group& out) {
    const uint8_t* packed = block + 4;
    const int i = group % 4;
    const bool late = group >= 4;
    const int scale = late ? (packed[8 + i] & 15) | (packed[i] >> 6) << 4 : packed[i] & 63;
    const int minimum = late ? (packed[8 + i] >> 4) | (packed[4 + i] >> 6) << 4 : packed[4 + i] & 63;
    out.scale[0] = half_at(block) * float(scale);
    out.minimum = -(half_at(block + 2) * float(minimum));
}

// Groups 2 c and 2 c + 1 share 32 bytes.
void read_shared_nibbles(const uint8_t* nibbles, int group, Group& out) {
    const uint8_t* bytes = nibbles + 32 * (group / 2);
    for (int i = 0; i < kGroup; ++i) out.q[i] = int8_t(bytes[i] >> 4 * (group % 2) & 15);
}

void read_q4_k(const uint8_t* block, int group, Group& out) {
    read_six_bit_scales(block, group, out);
    read_shared_nibbles(block + 16, group, out);
}

void read_q5_k(const uint8_t* block, int group, Group& out) {
    read_six_bit_scales(block, group, out);
    read_shared_nibbles(block + 48, group, out);
    for (int i = 0; i < kGroup; ++i) out.q[i] = int8_t(out.q[i] | (block[16 + i] >> group & 1) << 4);
}

// Two bits at 2 * (group % 4) of the 32 bytes of each half of the block.
int two_bits(const uint8_t* packed, int group, int i) { return packed[32 * (group / 4) + i] >> 2 * (group % 4) & 3; }

// Scale and minimum per 16 values do not make multiples of one number: the values are rounded to int8 once more.
void read_q2_k(const uint8_t* block, int group, Group& out) {
    const float d = half_at(block + 80), m = half_at(block + 82);
    for (int part = 0; part < 2; ++part) {
        const uint8_t packed = block[2 * group + part];
        const float scale = d * float(packed & 15), minimum = m * float(packed >> 4);
        float values[16], top = 0;
        for (int i = 0; i < 16; ++i) {
            values[i] = scale * float(two_bits(block + 16, group, 16 * part + i)) - minimum;
            top = std::max(top, std::fabs(values[i]));
        }
        out.scale[part] = top / 127.0f;
        for (int i = 0; i < 16; ++i)
            out.q[16 * part + i] = int8_t(top > 0 ? std::nearbyint(values[i] / out.scale[part]) : 0.0f);
    }
}

void read_q3_k(const uint8_t* block, int group, Group& out) {
    const uint8_t* packed = block + 96;
    for (int part = 0; part < 2; ++part) {
        const int at = 2 * group + part;
        const int low = at < 8 ? packed[at] & 15 : packed[at - 8] >> 4;
        const int high = packed[8 + at % 4] >> 2 * (at / 4) & 3;
        out.scale[part] = half_at(block + 108) * float((low | high << 4) - 32);
    }
    for (int i = 0; i < kGroup; ++i) {
        const int absent = ~(block[i] >> group) & 1;
        out.q[i] = int8_t(two_bits(block + 32, group, i) - 4 * absent);
    }
}

void read_q6_k(const uint8_t* block, int group, Group& out) {
    const float d = half_at(block + 208);
    for (int part = 0; part < 2; ++part) out.scale[part] = d * float(int8_t(block[192 + 2 * group + part]));
    // Each half of the block: 64 bytes whose low nibbles are groups 0 and 1, whose high ones 2 and 3.
    const uint8_t* low = block + 64 * (group / 4) + 32 * (group % 2);
    for (int i = 0; i < kGroup; ++i)
        out.q[i] = int8_t(((low[i] >> 4 * (group % 4 / 2) & 15) | two_bits(block + 128, group, i) << 4) - 32);
}

constexpr FileFormat kFormats[] = {
    {"F32", 1, 4, Format::F32, false, nullptr},          {"F16", 1, 2, Format::F16, false, nullptr},
    {"BF16", 1, 2, Format::BF16, false, nullptr},        {"Q8_0", 32, 34, Format::I8, false, read_q8_0},
    {"Q4_0", 32, 18, Format::I4, false, read_q4_0},      {"Q4_1", 32, 20, Format::I4, false, read_q4_1},
    {"Q5_0", 32, 22, Format::I8, false, read_q5_0},      {"Q5_1", 32, 24, Format::I8M, true, read_q5_1},
    {"Q2_K", 256, 84, Format::I8G16, true, read_q2_k},   {"Q3_K", 256, 110, Format::I8G16, true, read_q3_k},
    {"Q4_K", 256, 144, Format::I4, true, read_q4_k},     {"Q5_K", 256, 176, Format::I8M, true, read_q5_k},
    {"Q6_K", 256, 210, Format::I8G16, true, read_q6_k},
};

}  // namespace

const FileFormat* find_file_format(const std::string& name) {
    for (const FileFormat& format : kFormats)
        if (name == format.name) return &format;
    return nullptr;
}

}  // namespace headrace
