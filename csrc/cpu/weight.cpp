#include "weight.h"

#include "half.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <stdexcept>

namespace headrace {

namespace {

// Weights live in large mappings with huge pages, many to a mapping: one stream of a decode step touches all of them.
constexpr size_t kRegion = size_t(64) << 20;

struct Region {
    std::byte* base;
    size_t size, used = 0;
    explicit Region(size_t bytes) : size(bytes) {
        void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        madvise(p, bytes, MADV_HUGEPAGE);
        base = static_cast<std::byte*>(p);
    }
    ~Region() { munmap(base, size); }
};

Piece allocate_weight(size_t wanted) {
    static std::mutex mutex;
    static std::weak_ptr<Region> current;
    const size_t bytes = (wanted + 4095) / 4096 * 4096;
    std::lock_guard lock(mutex);
    std::shared_ptr<Region> region = current.lock();
    if (!region || region->size - region->used < bytes) {
        region = std::make_shared<Region>(std::max(bytes, kRegion));
        current = region;
    }
    auto* p = reinterpret_cast<uint8_t*>(region->base + region->used);
    region->used += bytes;
    return {p, wanted, region};
}

float source_value(Format format, const uint8_t* row, int k) {
    uint16_t h;
    float f;
    if (format == Format::F32) {
        std::memcpy(&f, row + size_t(k) * 4, 4);
        return f;
    }
    std::memcpy(&h, row + size_t(k) * 2, 2);
    if (format == Format::F16) return f16_to_float(h);
    const uint32_t bits = uint32_t(h) << 16;
    std::memcpy(&f, &bits, 4);
    return f;
}

// A group of floats, rounded; scale and minimum are float16 numbers.
void quantize_group(Format format, const uint8_t* row, int k0, bool four_bits, Group& g) {
    float x[kGroup], low = INFINITY, high = -INFINITY;
    for (int i = 0; i < kGroup; ++i) {
        x[i] = source_value(format, row, k0 + i);
        low = std::min(low, x[i]);
        high = std::max(high, x[i]);
    }
    const float step = four_bits ? (high - low) / 15.0f : std::max(high, -low) / 127.0f;
    const float d = g.scale[0] = f16_to_float(float_to_f16(step));
    const float m = g.minimum = four_bits ? f16_to_float(float_to_f16(low)) : 0.0f;
    for (int i = 0; i < kGroup; ++i) {
        const float q = d > 0 ? std::nearbyint((x[i] - m) / d) : 0.0f;
        g.q[i] = int8_t(four_bits ? std::min(15.0f, std::max(0.0f, q)) : std::min(127.0f, std::max(-127.0f, q)));
    }
}

void place_scales(const float* values, int count, bool wide, int lane, uint8_t* scales) {
    for (int i = 0; i < count; ++i) {
        const uint16_t half = float_to_f16(values[i]);
        if (wide) std::memcpy(scales + (kPanel * i + lane) * 4, values + i, 4);
        else std::memcpy(scales + (kPanel * i + lane) * 2, &half, 2);
    }
}

void place_group(Format format, bool wide, const Group& group, int g, int lane, uint8_t* panel) {
    uint8_t* bytes = panel + size_t(g) * group_stride(format, wide);
    if (format == Format::I4) {
        for (int i = 0; i < 16; ++i)
            bytes[(i / 4) * 64 + lane * 4 + i % 4] = uint8_t(group.q[i] | group.q[16 + i] << 4);
    } else {
        for (int i = 0; i < kGroup; i += 4) std::memcpy(bytes + i * 16 + lane * 4, group.q + i, 4);
    }
    const float scales[2] = {group.scale[0], format == Format::I8G16 ? group.scale[1] : group.minimum};
    place_scales(scales, format == Format::I8 ? 1 : 2, wide, lane, bytes + group_bytes(format));
}

// Panels [first_panel, ...) of a segment from one source; `index` counts the source's panels.
void pack_panel(const Segment& s, int first_panel, const SourceTensor& source, int k, int index) {
    const FileFormat& file = *source.format;
    uint8_t* panel = s.panel(first_panel + index);
    for (int lane = 0; lane < kPanel && index * kPanel + lane < source.rows; ++lane) {
        const uint8_t* row = source.data + size_t(index * kPanel + lane) * source.row_bytes;
        if (is_float(s.format)) {
            const size_t size = size_t(file.bytes);
            for (int i = 0; i < k; ++i) std::memcpy(panel + (size_t(i) * kPanel + lane) * size, row + i * size, size);
            continue;
        }
        for (int g = 0; g < k / kGroup; ++g) {
            Group group{};
            if (file.read) file.read_group(row, g, group);
            else quantize_group(file.packed, row, g * kGroup, s.format == Format::I4, group);
            place_group(s.format, s.wide_scales, group, g, lane, panel);
        }
    }
}

struct PackedForm {
    Format format;
    bool wide_scales;
    bool operator==(const PackedForm&) const = default;
};

PackedForm packed_form(const SourceTensor& source, int k, const std::string& quantize) {
    if (!source.format->read && k % kGroup == 0) {
        if (quantize == "int8") return {Format::I8, false};
        if (quantize == "int4") return {Format::I4, false};
    }
    return {source.format->packed, source.format->wide_scales};
}

const char* format_name(Format f) {
    switch (f) {
        case Format::F32: return "float32";
        case Format::F16: return "float16";
        case Format::BF16: return "bfloat16";
        case Format::I8: return "int8";
        case Format::I8M: return "int5";
        case Format::I8G16: return "int8_g16";
        default: return "int4";
    }
}

}  // namespace

bool Weight::quantized() const {
    for (const auto& s : segments)
        if (is_float(s.format)) return false;
    return true;
}

std::string Weight::format() const {
    std::string name;
    for (const auto& s : segments)
        if (name.find(format_name(s.format)) == std::string::npos)
            name.append(name.empty() ? "" : "+").append(format_name(s.format));
    return name;
}

std::shared_ptr<Weight> pack_weight(Team& team, const std::vector<SourceTensor>& parts, int in_features,
                                    const std::string& quantize, bool gated, const std::vector<Piece>& packed) {
    auto weight = std::make_shared<Weight>();
    weight->in_features = in_features;
    for (size_t first = 0, next = 0; first < parts.size(); first = next) {
        Segment s{};
        const PackedForm form = packed_form(parts[first], in_features, quantize);
        s.format = form.format;
        s.wide_scales = form.wide_scales;
        s.first_row = weight->out_features;
        s.stride = panel_bytes(s.format, s.wide_scales, in_features);
        do {
            s.rows += parts[next++].rows;
        } while (!gated && next < parts.size() && s.rows % kPanel == 0 &&
                 packed_form(parts[next], in_features, quantize) == form);
        s.panels = (s.rows + kPanel - 1) / kPanel;
        s.pair_stride = 2 * s.stride;
        if (gated && first == 1 && packed_form(parts[0], in_features, quantize) == form) {
            s.pair_stride = weight->segments[0].pair_stride;
            s.data = weight->segments[0].data + 2 * s.stride;
        } else {
            // Room for the other half too, if it has the same format.
            const bool both = gated && first == 0 && packed_form(parts[1], in_features, quantize) == form;
            const size_t pairs = size_t(s.panels + 1) / 2;
            s.pair_stride *= both ? 2 : 1;
            const size_t bytes = s.pair_stride * pairs, index = weight->pieces.size();
            if (!packed.empty() && (index >= packed.size() || packed[index].bytes != bytes))
                throw std::invalid_argument("packed pieces do not fit these parts");
            weight->pieces.push_back(packed.empty() ? allocate_weight(bytes) : packed[index]);
            s.data = weight->pieces.back().data;
            weight->num_bytes += bytes;
        }
        for (size_t i = first, panel = 0; i < next && packed.empty(); panel += size_t(parts[i++].rows / kPanel)) {
            const int64_t panels = (parts[i].rows + kPanel - 1) / kPanel;
            team.run([&](int tid) {
                team.for_each(tid, panels, [&](int64_t p) { pack_panel(s, int(panel), parts[i], in_features, int(p)); });
            });
        }
        weight->segments.push_back(s);
        weight->out_features += s.rows;
    }
    return weight;
}

}  // namespace headrace
