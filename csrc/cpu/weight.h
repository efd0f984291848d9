// Packed matrices and how file formats become panels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "file_formats.h"
#include "team.h"

namespace headrace {

// Rows of one format: panels of 16, the last one padded with zeros. Panels lie in pairs; the pairs of a gate and of its up
// half alternate, so that a gated product reads one stream.
struct Segment {
    Format format;
    bool wide_scales;
    int first_row;
    int rows;
    int panels;
    size_t stride, pair_stride;
    uint8_t* data;

    uint8_t* panel(int index) const { return data + size_t(index / 2) * pair_stride + size_t(index % 2) * stride; }
};

// One tensor as it lies in a file; without `data` only what it looks like.
struct SourceTensor {
    const FileFormat* format;
    int rows;
    const uint8_t* data;
    size_t row_bytes;
};

// A stretch of packed panels and what keeps it in memory.
struct Piece {
    uint8_t* data;
    size_t bytes;
    std::shared_ptr<void> owner;
};

class Weight {
public:
    int out_features = 0;
    int in_features = 0;
    size_t num_bytes = 0;
    std::vector<Segment> segments;
    std::vector<Piece> pieces;

    // Integer products are possible: every part is quantised.
    bool quantized() const;
    std::string format() const;
};

// Packs `parts`, joined by rows, in parallel. `quantize` is "", "int8" or "int4" and applies to float parts. Neighbours of one
// form become one segment unless `gated`: then there are two parts of equal shape. With `packed`, the pieces of a weight that
// was packed from such parts before, nothing is packed: they are used where they lie.
std::shared_ptr<Weight> pack_weight(Team& team, const std::vector<SourceTensor>& parts, int in_features,
                                    const std::string& quantize, bool gated, const std::vector<Piece>& packed = {});

}  // namespace headrace
